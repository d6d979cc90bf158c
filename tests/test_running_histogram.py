"""Running histograms, and their form for Prometheus."""

from common.metric_families import counters, gauges, histogram, text_of
from common.running_histogram import RunningHistogram, decades


def test_a_value_is_in_the_bucket_whose_bound_it_equals_and_above_all_bounds_in_the_last() -> None:
    seen = RunningHistogram((1, 10))
    for value, times in ((0.5, 1), (1, 2), (1.5, 1), (10, 1), (10.5, 3)):
        seen.observe(value, times)
    assert seen.counts == [3, 2, 3]
    assert seen.sum == 0.5 + 2 + 1.5 + 10 + 31.5


def test_decades_end_with_their_power_of_ten() -> None:
    assert decades((1, 2.5, 5), -2, 0) == [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1]


def test_the_text_sums_up_buckets_and_escapes_labels() -> None:
    seen = RunningHistogram((1, 10))
    seen.observe(5)
    seen.observe(50)
    text = text_of(
        [
            histogram("vllm:x_seconds", "About.", {"model_name": 'a "model"'}, seen),
            counters("quire_y", "About.", [({}, 2)]),
            gauges("quire_z", "About.", [({"worker": "a"}, 0), ({"worker": "b"}, 1)]),
        ]
    ).decode()
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        'vllm:x_seconds_bucket{le="1.0",model_name="a \\"model\\""} 0.0',
        'vllm:x_seconds_bucket{le="10.0",model_name="a \\"model\\""} 1.0',
        'vllm:x_seconds_bucket{le="+Inf",model_name="a \\"model\\""} 2.0',
        'vllm:x_seconds_count{model_name="a \\"model\\""} 2.0',
        'vllm:x_seconds_sum{model_name="a \\"model\\""} 55.0',
        "quire_y_total 2.0",
        'quire_z{worker="a"} 0.0',
        'quire_z{worker="b"} 1.0',
    ]
