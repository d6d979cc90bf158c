"""Section of scaling under load, from meaningless figures."""

from typing import Any

import pytest

from benchmarks.results_page.scaling import SCALING
from tests.scaling.deployment import End
from tests.scaling.scenario import checked_ends


def document(pause_s: float) -> dict[str, Any]:
    step = {"step": "workers → 4", "whole_after_s": 8.0, "workers_by_shard": [2, 1, 1], "longest_pause_s": pause_s}
    ends = checked_ends([End("worker 4", 1.25, 0)], [End("redis 1", 0.5, 0)])
    run = {
        "deployment": "containers",
        "streams": 100,
        "tokens": 35_000,
        "longest_pause_s": pause_s,
        "steps": [{**step, "longest_wait_for_first_token_s": 4.0}],
        "ends": ends,
    }
    return {"benchmark": "scaling_under_load", "most_pause_s": 3.0, "runs": [run]}


@pytest.mark.parametrize(("pause_s", "verdict"), [(2.99, "met"), (3.004, "**1 of 2 not met**")])
def test_a_stream_that_stands_still_for_too_long_misses_the_target(pause_s: float, verdict: str) -> None:
    assert SCALING.render is not None
    section = SCALING.render(document(pause_s))
    assert section.verdict == verdict
    assert "| containers | worker 4 | yes | 1.2 s |" in "\n".join(section.blocks)
    assert "| containers | redis 1 | no | 0.5 s |" in "\n".join(section.blocks)
