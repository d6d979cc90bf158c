"""The worker's process as it is, with a count of the tokens that its steps computed.

    python -m benchmarks.services.counting_worker FILE -- [flags of worker_svc]

The count is written at the end: one number.
"""

import argparse
import sys
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


class CountingRunner:
    """Counts what another runner executes."""

    def __init__(self, runner: StepRunner) -> None:
        self.num_tokens = 0
        self._runner = runner

    def launch(self, step: Step) -> StepResult | PendingStep:
        """Launch a step as the other engine does, and count its tokens."""
        launched = self._runner.launch(step)
        self.num_tokens += sum(step.num_tokens) or len(step.rows)
        return launched


def main() -> None:
    """Runs `worker_svc` with the class above around its runner."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=Path)
    parser.add_argument("flags", nargs="*")
    arguments = parser.parse_args()
    sys.argv[1:] = arguments.flags
    runners: list[CountingRunner] = []

    def load_counting_engine(settings: WorkerSettings, status: Status) -> LoadedModel:
        engine = load_model(settings, status)
        runners.append(CountingRunner(engine.runner))
        return LoadedModel(runners[0], engine.description)

    setattr(worker_process, "load_model", load_counting_engine)  # noqa: B010 - mypy allows no assignment
    try:
        worker_main.main()
    finally:
        arguments.count.write_text(str(sum(runner.num_tokens for runner in runners)))


if __name__ == "__main__":
    main()
