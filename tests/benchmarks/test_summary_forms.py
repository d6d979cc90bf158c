"""Forms of summaries that are compared all find what is cached; the one in use takes nothing else for it."""

import random

import pytest

from benchmarks.scale.summary_forms import CHANGED, FORMS, measure, section_of
from quire.prompt_beginnings import LENGTHS, Beginning
from scheduler_svc.core.cached_prompts import MOST_HASHES


@pytest.mark.parametrize("name", FORMS)
def test_a_form_finds_all_that_its_shards_have(name: str) -> None:
    draw, form = random.Random(1), FORMS[name]()
    asked = [Beginning(length, draw.getrandbits(64)) for length in LENGTHS]
    for shard, num_known in enumerate((5, 40, 0)):
        form.take(shard, form.pack([draw.getrandbits(64) for _ in range(9)]))
        form.take(shard, form.pack([each.hash for each in asked[:num_known]]))
    assert form.find(asked) == {0: LENGTHS[4], 1: LENGTHS[39]}


def test_the_form_in_use_is_measured_with_a_full_summary() -> None:
    row = measure(next(iter(FORMS)), 3)
    assert (row.shards, row.summary_bytes, row.false_positives) == (3, 4 * MOST_HASHES, 0)
    assert row.take_us > 0 and row.find_us > 0 and 0 < CHANGED < MOST_HASHES


def test_the_section_tells_the_form_in_use() -> None:
    row = {"shards": 4, "form": next(iter(FORMS)), "summary_bytes": 8192, "false_positives": 0.0}
    section = section_of({"hashes": 2048, "lengths": 48, "rows": [{**row, "take_us": 90.0, "find_us": 3.0}]})
    assert "8,192 bytes" in section.headlines[0].figure and "3 µs" in section.headlines[0].figure
