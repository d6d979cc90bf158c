"""A worker's process as it is, around a runner that can be made to fail: by the clock of its steps, or by a token.

    python -m tests.chaos.faulty_worker [flags of worker_svc]

What it does wrong is in the environment: CHAOS_FAULT is `raise`, `nan` or `exit` (whenever a sequence has the token
POISON), `raise_now_and_then` (every PERIODth step that computes), or `slow` (each step takes SLOWNESS times as long
while the file CHAOS_FLAG exists). Nothing of this is in the worker itself.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

import common.grpc_environment  # noqa: F401 - as in `worker_svc`
from common.status import Status
from common.step import Step, StepResult
from quire.worker_settings import WorkerSettings
from worker_svc import __main__ as worker_main
from worker_svc import process as worker_process
from worker_svc.loaded_model import LoadedModel
from worker_svc.start.loading import load_model
from worker_svc.steps.step_runner import PendingStep, StepRunner

POISON = 2  # the demo model's padding, which no prompt and no output has by itself
PERIOD = 40
SLOWNESS = 10
EXIT_CODE = 9


class FaultyRunner:
    """Fails instead of another runner, or lets it do its work."""

    def __init__(self, runner: StepRunner, fault: str, flag: Path | None) -> None:
        self._runner = runner
        self._fault = fault
        self._flag = flag
        self._num_steps = 0
        self._poisoned: set[int] = set()  # seats

    def launch(self, step: Step) -> StepResult | PendingStep:
        """Launch a step as the real runner does, except for the fault."""
        self._note_seats(step)
        touched = self._poisoned.intersection(step.rows)
        self._num_steps += bool(step.rows)
        if touched and self._fault == "exit":
            os._exit(EXIT_CODE)
        if touched and self._fault == "raise":
            raise RuntimeError("the step has a poisonous token")
        if self._fault == "raise_now_and_then" and step.rows and self._num_steps % PERIOD == 0:
            raise RuntimeError("a step now and then")
        began_s = time.monotonic()
        launched = self._runner.launch(step)
        if self._fault == "slow" and self._flag is not None and self._flag.exists():
            time.sleep((SLOWNESS - 1) * (time.monotonic() - began_s))
        if touched and self._fault == "nan" and isinstance(launched, StepResult):
            return replace(launched, invalid_samples=_samples_of(step, touched))
        return launched

    def _note_seats(self, step: Step) -> None:
        if step.snapshot:
            self._poisoned.clear()
        self._poisoned.difference_update(step.freed_seats)
        for state in step.whole:
            self._poisoned.discard(state.seat)
            if POISON in state.token_ids or POISON in state.history:
                self._poisoned.add(state.seat)


def _samples_of(step: Step, seats: set[int]) -> list[int]:
    sampled = step.rows if step.samples is None else step.samples[1::2]
    return [index for index, seat in enumerate(sampled) if seat in seats]


def main() -> None:
    """Runs `worker_svc` with the class above around its runner."""
    fault = os.environ["CHAOS_FAULT"]
    flag = Path(os.environ["CHAOS_FLAG"]) if "CHAOS_FLAG" in os.environ else None

    def load_faulty_engine(settings: WorkerSettings, status: Status) -> LoadedModel:
        engine = load_model(settings, status)
        return LoadedModel(FaultyRunner(engine.runner, fault, flag), engine.description)

    setattr(worker_process, "load_model", load_faulty_engine)  # noqa: B010 - mypy allows no assignment
    worker_main.main()


if __name__ == "__main__":
    main()
