"""The benchmark of shards runs in small, and judges a ratio only where cores are left."""

import pytest
from redis import Redis

from benchmarks.scale.shard_throughput import CORES_ARE_OF, Rate, Row, measure, section_of, store_cpu_s
from benchmarks.services.processes import embedded_valkey


@pytest.mark.long
@pytest.mark.timeout(240)
def test_both_sides_are_measured_with_real_schedulers() -> None:
    (row,) = measure(2, [4], rounds=1, seconds=0.5)
    assert row.batch == 4 and len(row.ratios) == 1
    for rate in (row.one, row.several):
        assert rate.tokens_per_s > 0 and rate.cores > 0 and rate.scheduler_us > 0


@pytest.mark.parametrize(
    ("cores", "ratio", "verdict"), [(1.2, 2.9, "met"), (1.2, 2.5, "not met"), (1.9, 1.4, "no target")]
)
def test_a_ratio_is_judged_where_cores_are_left(cores: float, ratio: float, verdict: str) -> None:
    one = Rate(tokens_per_s=1000.0, cores=0.5, scheduler_us=90.0)
    row = Row(batch=8, one=one, several=Rate(tokens_per_s=1000 * ratio, cores=cores, scheduler_us=90.0), ratios=[ratio])
    document = {
        "shards": 3,
        "workers_each": 2,
        "clients": 8,
        "step_ms": 8.0,
        "rounds": 1,
        "cores": 2,
        "cores_are_of": CORES_ARE_OF,
        "rows": [{"batch": row.batch, "one": vars_of(row.one), "several": vars_of(row.several), "ratios": row.ratios}],
    }
    section = section_of(document)
    assert verdict in section.verdict
    assert "not counted" not in section.done
    assert "the store's, which are not counted here" in section_of({**document, "cores_are_of": ()}).done
    assert f"{ratio:.2f} ×" in section.headlines[0].figure


def test_the_store_counts_among_the_processes_that_use_cores() -> None:
    with embedded_valkey(None) as url, Redis.from_url(url) as store:
        before_s = store_cpu_s(store)
        while store_cpu_s(store) == before_s:  # each question takes it some time
            store.ping()
    assert "store" in CORES_ARE_OF


def vars_of(rate: Rate) -> dict[str, float]:
    return {"tokens_per_s": rate.tokens_per_s, "cores": rate.cores, "scheduler_us": rate.scheduler_us}
