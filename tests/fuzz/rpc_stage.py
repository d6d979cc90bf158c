"""Fuzzed messages over every RPC, of a real scheduler beside a client that behaves, and of a real worker."""

from collections.abc import Awaitable, Callable
from functools import partial

from tests.chaos_input.every_rpc import MOST_GROWTH, Report, fuzz_scheduler, fuzz_worker
from tests.fuzz.outcome import Outcome, Stage

MIB = 1 << 20


async def _play(name: str, fuzz: Callable[[int, int], Awaitable[Report]], num_inputs: int, seed: int) -> Outcome:
    outcome = Outcome(name, num_inputs)
    try:
        report = await fuzz(num_inputs, seed)
    except (AssertionError, TimeoutError) as error:
        outcome.fail(f"{type(error).__name__}: {error}")
        return outcome
    for what, count in report.undocumented.items():
        outcome.fail(f"{what}: {count} times, which no proto documents")
    if report.resident_after > MOST_GROWTH * report.resident_before:
        outcome.fail(f"resident memory went from {report.resident_before} to {report.resident_after} bytes")
    for method_and_status, count in report.answers.items():
        outcome.answers[method_and_status.rpartition(" ")[2]] += count
    outcome.figures = {
        "resident_before_mib": round(report.resident_before / MIB, 1),
        "resident_after_mib": round(report.resident_after / MIB, 1),
    }
    return outcome


STAGES = (
    Stage(name="scheduler", num_inputs=40_000, play=partial(_play, "messages to the scheduler", fuzz_scheduler)),
    Stage(name="worker", num_inputs=10_000, play=partial(_play, "messages to a worker", fuzz_worker)),
)
