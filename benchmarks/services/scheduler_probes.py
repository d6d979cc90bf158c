"""Probes of an iteration's stages in the scheduler's process: spans around the calls that do them.

The only file that reaches into the scheduler for that; a scheduler that is not measured never loads it.
"""

import time
from itertools import count

from benchmarks.services.stage_spans import SpanLog
from common import step_wire
from quire.v1 import inference_pb2 as pb
from scheduler_svc.api import inference_servicer
from scheduler_svc.api.session import ServerSession
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.journal_entry import PendingEntry
from scheduler_svc.journal.redis_store import RedisStore
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.live_sample import LiveSample
from scheduler_svc.requests.live.publisher import Publisher
from scheduler_svc.workers import worker_link, worker_loop


def probe_scheduler(log: SpanLog) -> None:
    """Install the probes, once, before the process serves. Assumes one worker and one session."""
    log.wrap(Scheduler, "schedule", "schedule")
    log.wrap(worker_loop, "build_step", "encode")
    log.wrap(worker_link, "step_to_pb", "encode")
    log.wrap(step_wire, "seal_request", "seal", lambda arguments, _: int(arguments[0].step_id))
    log.wrap(worker_link, "open_response", "open", lambda _, message: int(message.step_id))
    log.wrap(worker_link, "result_from_pb", "decode")
    log.wrap(worker_loop.WorkerLoop, "_take_result", "apply")
    log.wrap(Engine, "record_scheduled", "note")
    log.wrap(Scheduler, "cache_decoded_blocks", "offer")
    log.wrap(Engine, "settle", "settle")
    log.wrap(LiveSample, "push_text", "text")
    log.wrap(Journal, "append", "pack")
    log.wrap(PendingEntry, "encode", "pack")
    setattr(RedisStore, "append", log.timed_wait("xadd", RedisStore.append))  # noqa: B010 - mypy allows none other
    log.wrap(Publisher, "_release", "release")
    log.wrap(ServerSession, "_take_news", "publish")
    numbers = count(1)

    class ProbedSession(ServerSession):
        """Notes how long gRPC takes a response: serialises it, and hands it on."""

        made_ns: int | None = None  # when the last response was

        async def next_response(self) -> pb.SessionResponse | None:
            if self.made_ns is not None:
                log.add("send", next(numbers), self.made_ns, time.perf_counter_ns())
            response = await super().next_response()
            self.made_ns = time.perf_counter_ns()
            return response

    setattr(inference_servicer, "ServerSession", ProbedSession)  # noqa: B010
