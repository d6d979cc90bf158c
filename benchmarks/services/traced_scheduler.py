"""The scheduler's process as it is, with a note of each step's moments; optionally under a profiler.

    python -m benchmarks.services.traced_scheduler [--profile FILE] [--spans FILE] TRACE -- [flags of scheduler_svc]

The trace is written at the end. Without the profiler the notes cost a microsecond or two a step.
"""

import argparse
import cProfile
import sys
import time
from pathlib import Path

import common.grpc_environment  # noqa: F401 - as in `scheduler_svc`
from benchmarks.services.scheduler_probes import probe_scheduler
from benchmarks.services.stage_spans import SpanLog
from benchmarks.services.step_trace import SchedulerMoments, StepTrace
from common.process import end_after
from common.step import Step, StepResult
from scheduler_svc import __main__ as scheduler_main
from scheduler_svc import composition
from scheduler_svc.workers import worker_driver
from scheduler_svc.workers.worker_link import WorkerLink
from scheduler_svc.workers.worker_loop import WorkerLoop

trace = StepTrace[SchedulerMoments]()
sent_ns: dict[int, int] = {}  # by step_id; one worker is assumed
cpu_ns: dict[int, int] = {}


class TracedLink(WorkerLink):
    """Notes when a step is sent."""

    async def send(self, step: Step) -> None:
        sent_ns[step.step_id] = time.perf_counter_ns()
        await super().send(step)
        cpu_ns[step.step_id] = time.process_time_ns()


class TracedLoop(WorkerLoop):
    """Notes when a result is taken."""

    def _take_result(self, result: StepResult) -> None:
        taken_ns, step_id = time.perf_counter_ns(), result.step_id
        trace.add(SchedulerMoments(step_id, sent_ns.pop(step_id), taken_ns, result.exec_ns, cpu_ns.pop(step_id)))
        super()._take_result(result)


def main() -> None:
    """Runs `scheduler_svc` with the two classes above in the place of theirs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--profile", type=Path, help="write the event loop's profile here, in the form of cProfile")
    parser.add_argument("--spans", type=Path, help="write the spans of an iteration's stages here")
    parser.add_argument("flags", nargs="*")
    arguments = parser.parse_args()
    sys.argv[1:] = arguments.flags
    setattr(composition, "WorkerLink", TracedLink)  # noqa: B010 - mypy allows none other
    setattr(worker_driver, "WorkerLoop", TracedLoop)  # noqa: B010
    spans = SpanLog()
    if arguments.spans is not None:
        probe_scheduler(spans)
    try:
        if arguments.profile is None:
            scheduler_main.main()
        else:
            profiler = cProfile.Profile()
            profiler.runcall(scheduler_main.main)
            profiler.dump_stats(arguments.profile)
    finally:
        trace.write(arguments.trace)
        if arguments.spans is not None:
            spans.write(arguments.spans)


if __name__ == "__main__":
    end_after(main)
