"""A worker whose process is killed by one prompt: the real one, with a runner around its own that dies of POISON.

For tests: `python -m tests.e2e.poisoned_worker` takes the arguments of `python -m worker_svc`.
"""

import os
import signal
import sys

import common.grpc_environment  # noqa: F401 - before gRPC is loaded
from common.log import set_up_logging
from common.process import end_after, run_service
from common.settings import settings_or_exit
from common.step import Step, StepResult
from quire.worker_settings import WorkerSettings
from worker_svc.loaded_model import LoadedModel
from worker_svc.service.lifecycle import ServiceOptions, serve
from worker_svc.start.loading import load_model
from worker_svc.steps.step_runner import PendingStep, StepRunner

POISON = [5, 9, 5, 11, 5, 13]  # so that no model says it by chance


class PoisonedRunner:
    """Dies in a step that is to compute a sequence with POISON in it."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner

    def launch(self, step: Step) -> StepResult | PendingStep:
        rows = set(step.rows)
        for seat in step.whole:
            if seat.seat in rows and contains(list(seat.token_ids), POISON):
                os.kill(os.getpid(), signal.SIGKILL)
        return self._runner.launch(step)


def contains(token_ids: list[int], part: list[int]) -> bool:
    """True if `part` occurs in `token_ids` as one contiguous run."""
    return any(token_ids[i : i + len(part)] == part for i in range(len(token_ids)))


def load_poisoned(settings: WorkerSettings) -> LoadedModel:
    engine = load_model(settings)
    return LoadedModel(PoisonedRunner(engine.runner), engine.description)


def main() -> None:
    """Entry point."""
    settings = settings_or_exit("worker", WorkerSettings, sys.argv[1:])
    set_up_logging("worker", settings.log_level)
    options = ServiceOptions(
        listen=settings.listen,
        advertise=settings.advertise,
        scheduler=settings.scheduler,
        worker_id=settings.worker_id,
        parent_pipe_fd=settings.parent_pipe_fd,
        drain_timeout_s=settings.drain_timeout_s,
    )
    run_service(serve(options, lambda: load_poisoned(settings)))


if __name__ == "__main__":
    end_after(main)
