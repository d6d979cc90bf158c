"""Costs in a fleet: the time of a worker's step, and CPU time of schedulers, as they were measured.

What a scheduler's process costs is read from the results of benchmarks with real processes, and so follows them.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

from benchmarks.report import RESULTS


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCosts:
    """Time of a step, in seconds: fixed, a row, a prompt token, a token of context that a row reads."""

    name: str
    step_s: float
    row_s: float = 0.0
    prompt_token_s: float = 0.0
    context_token_s: float = 0.0

    def of(self, num_rows: int, num_tokens: int, num_context_tokens: int) -> float:
        """Time of a step with so many rows, tokens computed, and tokens of context in all rows."""
        num_prompt_tokens = num_tokens - num_rows
        return (
            self.step_s
            + self.row_s * num_rows
            + self.prompt_token_s * num_prompt_tokens
            + self.context_token_s * num_context_tokens
        )


# The simulated worker of `benchmarks.scale.shard_throughput`: 8 ms whatever the batch is.
FIXED_8_MS = WorkerCosts(name="8 ms a step", step_s=8e-3)

# Arithmetic, not a measurement: a model of 8 B parameters in bfloat16 on an H200 with this project's kernels, by an
# outside review of the compiled code. Its step times in ms (the middle where it gives a range) by (rows, context):
REVIEWED_STEPS_MS = {(1, 2048): 5.05, (32, 2048): 7.05, (256, 1024): 16.0, (256, 2048): 25.0}
# Through the first and the two last of them: 9 ms for 262,144 tokens of context more; then 2.0 ms for 255 rows more.
_CONTEXT_TOKEN_S = 9e-3 / (256 * 1024)
_ROW_S = (16.0e-3 - 5.05e-3 - (256 * 1024 - 2048) * _CONTEXT_TOKEN_S) / 255
GPU_8B = WorkerCosts(
    name="8 B on a GPU",
    step_s=5.05e-3 - _ROW_S - 2048 * _CONTEXT_TOKEN_S,
    row_s=_ROW_S,
    prompt_token_s=16e9 / 784e12,  # 16 GFLOP, at the rate of that review for products of 256 rows
    context_token_s=_CONTEXT_TOKEN_S,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCosts:
    """CPU time of a scheduler's process, in seconds.

    A step costs what was measured with so many rows: a straight line between the points, and beyond the last one its
    cost for each row. `turn_part` of it is spent before the next step is sent, the rest to publish the tokens.
    """

    points: Sequence[tuple[int, float]]  # rows of a step, its cost; rising rows
    turn_part: float
    request_s: float  # to admit a request, and to end it
    rebuild_s: float  # a live request, by a scheduler that takes over
    journal_read_s: float  # likewise
    factor: float = 1.0  # all of it, for the question what a faster scheduler would give

    def __post_init__(self) -> None:
        """Refuse what cannot have been measured. Raises ValueError."""
        if min(self.request_s, self.rebuild_s, self.journal_read_s, *(cost_s for _, cost_s in self.points)) < 0:
            raise ValueError(f"a scheduler's work costs less than nothing: {self}")

    def of_step(self, num_rows: int) -> float:
        """Cost of one step of a worker."""
        index = bisect_right(self.points, (num_rows, float("inf")))
        if index == 0:
            return self.factor * self.points[0][1]
        rows, cost_s = self.points[index - 1]
        if index == len(self.points):
            return self.factor * cost_s * num_rows / rows
        more_rows, more_s = self.points[index]
        return self.factor * (cost_s + (more_s - cost_s) * (num_rows - rows) / (more_rows - rows))


@cache
def measured_scheduler() -> SchedulerCosts:
    """Costs by the results that are kept in the repository."""
    shards, overhead, recovery = _result("shard_throughput"), _result("overhead"), _result("recovery_time")
    points = [(row["batch"], row["one"]["scheduler_us"] * 1e-6 * row["batch"]) for row in shards["rows"]]
    steps = overhead["parts"]["steps"]["rows"]
    (full,) = [row["medians"] for row in steps if (row["depth"], row["batch"]) == (2, 256)]
    (turn,) = [row["medians"] for row in steps if (row["depth"], row["batch"]) == (1, 256)]
    delivery = overhead["parts"]["delivery"]  # requests come and go there; in the same run, since both costs are close
    more_us = delivery["cpu_us_per_token"]["scheduler"] - full["scheduler_cpu_ms"] * 1e3 / 256  # a token
    return SchedulerCosts(
        points=(*points, (256, full["scheduler_cpu_ms"] * 1e-3)),
        turn_part=turn["turn"]["p50"] / turn["scheduler_cpu_ms"],
        request_s=more_us * 1e-6 * fmean(delivery["load"]["output_tokens"]),
        rebuild_s=recovery["full"]["all_rebuilt_s"] / recovery["requests"],
        journal_read_s=recovery["full"]["journal_read_s"] / recovery["requests"],
    )


@cache
def measured_gateway_token_s() -> float:
    """CPU time of a gateway's process for a token of a completion, in seconds: the mean over step times."""
    rows = [row for row in _result("gateway_cost")["rows"] if row["route"] == "/v1/completions"]
    return fmean(row["gateway_us_per_token"] for row in rows) * 1e-6


def _result(kind: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / f"{kind}.json").read_text())
    return document
