"""Composition root of the scheduler: reads the settings, builds the parts, serves until it is told to end."""

import asyncio
import gc
import socket
import sys
import uuid
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

import structlog

import common.grpc_poller  # noqa: F401 - before gRPC is loaded
from common.address import advertised_address
from common.log import set_up_service_logging
from common.process import end_after, ending, run_service, unless_failed
from common.refusal import refuse_to_start
from common.rpc import Keepalive
from common.serving import GrpcServer, ListenError
from common.settings import settings_or_exit
from common.status import Status
from quire.rpc import PUBLIC_MESSAGE_BYTES
from quire.scheduler_settings import SchedulerSettings
from quire.settings import names_given, to_toml
from quire.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from scheduler_svc.api.cluster_servicer import ClusterServicer
from scheduler_svc.api.inference_servicer import InferenceServicer
from scheduler_svc.api.leader_gate import LeaderGate
from scheduler_svc.api.readiness import Readiness
from scheduler_svc.api.stats import StatsReporter
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.edge_limits import edge_limits
from scheduler_svc.full_collections import FullCollections
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.leases import Lease, Leases
from scheduler_svc.journal.open_store import open_leases, open_store, open_tail
from scheduler_svc.journal.records import Records
from scheduler_svc.journal.store import FencedError, RecordLimits, Store, StoreError
from scheduler_svc.leadership.hot_journal import HotJournal
from scheduler_svc.leadership.standby import Standby
from scheduler_svc.leadership.take_over import Attempt, TakeOver
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.readers import Readers
from scheduler_svc.requests.prefixes.prefix_keeper import PrefixKeeper
from scheduler_svc.requests.prefixes.prefix_requests import PinLimits, Prefixes
from scheduler_svc.requests.queue_limits import AdmissionLimits
from scheduler_svc.requests.recovery.recovery import Recovery
from scheduler_svc.requests.request_list import RequestList
from scheduler_svc.workers.worker_loop import SupersededError
from scheduler_svc.workers.workers import Workers

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
CLUSTER = cluster_pb2.DESCRIPTOR.services_by_name["Cluster"].full_name
JOURNAL = "quire.v1.Journal"  # by health alone

_LEAVE_S = 0.2  # for a standby to say that it is gone; meanwhile we lead on
_MOST_BATCHED_TOKENS = 65_536  # in a step, whatever a worker says that it takes

log = structlog.get_logger()

Result = TypeVar("Result")


def main() -> None:
    """Entry point of `python -m scheduler_svc`."""
    settings = settings_or_exit("scheduler", SchedulerSettings, sys.argv[1:])
    if settings.print_config:
        sys.stdout.write(to_toml(settings) + "\n")
        return
    names = names_given(SchedulerSettings, sys.argv[1:])
    set_up_service_logging("scheduler", settings, Status(settings.status_fd), names)
    gc.collect()
    gc.freeze()  # what was imported stays for good: a full collection, which stops everything, need not walk it
    try:
        run_service(serve(settings))
    except (SupersededError, FencedError) as error:
        log.error("scheduler ends", reason=str(error))
        raise SystemExit(1) from None
    except (ListenError, StoreError) as error:
        refuse_to_start("scheduler", str(error), names)


async def serve(settings: SchedulerSettings) -> None:
    """Serves until SIGTERM. Raises ListenError, StoreError, and SupersededError if a newer scheduler took over."""
    if settings.standby:
        open_tail(settings.store, deployment=settings.deployment)  # says so at once if there can be none
    end = ending(settings.parent_pipe_fd)
    store = await _before(
        end, open_store(settings.store, deployment=settings.deployment, patience_s=settings.store_timeout_s)
    )
    if store is None:
        log.info("scheduler ended", reason="told to end while it waited for the store")
        return
    leases = open_leases(settings.store, deployment=settings.deployment, lease_ms=settings.lease_ms)
    try:
        await _serve_with(store, leases, settings, end)
    finally:
        await leases.close()
        await store.close()


async def _serve_with(store: Store, leases: Leases, settings: SchedulerSettings, end: asyncio.Event) -> None:
    gate = LeaderGate((INFERENCE, CLUSTER))
    server = GrpcServer(
        (INFERENCE, CLUSTER),
        PUBLIC_MESSAGE_BYTES,
        slow_reader_timeout_s=settings.slow_reader_timeout_s,
        keepalive=Keepalive(time_s=settings.keepalive_time_s, timeout_s=settings.keepalive_timeout_s),
        limits=edge_limits(settings),
    )
    server.grpc.add_generic_rpc_handlers((gate,))
    address = server.bind(settings.listen)
    me = Lease(f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}", advertised_address(address, settings.advertise))
    hot = standby = None
    if settings.standby:
        hot = HotJournal(
            open_tail(settings.store, deployment=settings.deployment), store, record_ttl_s=settings.record_ttl_s
        )
        standby = Standby(leases, me, hot, lease_ms=settings.lease_ms, on_leader=gate.note_leader)
        await server.start()
        await server.set_serving("", True)
        log.info("listening", address=address, store=store.kind, standby=True)
    full_collections = FullCollections()
    full_collections.put_off()  # while what earlier leaders left is read
    taking_over = TakeOver(
        partial(_new_attempt, store, me, settings),
        store,
        leases,
        me,
        lease_ms=settings.lease_ms,
        store_timeout_s=settings.store_timeout_s,
        standby=standby,
        hot=hot,
    )
    try:
        leading = await _before(end, taking_over.lead())
    finally:
        if hot is not None:
            await hot.close()
    if leading is None:
        await server.stop(0)
        log.info("scheduler ended")
        return
    attempt, epoch, lease, keeping_lease = leading.attempt, leading.epoch, leading.lease, leading.keeping_lease
    journal, records, engine = attempt.journal, attempt.records, attempt.engine
    readers, recovery = attempt.readers, attempt.recovery
    admission = Admission(engine, _admission_limits(settings), readers, recovery)
    keeper = PrefixKeeper(engine, admission.keeps_its_word)
    if settings.prefix_cache:
        keeper.restore(recovery.pins)
    elif recovery.pins:
        log.warning("pins are forgotten, since prefix_cache is off", num_pins=len(recovery.pins))
    prefixes = Prefixes(admission, keeper, _pin_limits(settings), is_enabled=settings.prefix_cache)
    fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    readiness = Readiness(server)
    workers = Workers(
        engine,
        admission,
        keeper,
        epoch=epoch,
        send_whole=settings.step_form == "whole",
        decide=settings.decide,
        only_model=settings.only_model,
        model_patience_s=settings.model_patience_s,
        on_change=partial(readiness.announce, INFERENCE),
        on_fatal=lambda error: None if fatal.done() else fatal.set_exception(error),
        longer=lease.longer,
    )
    stats = StatsReporter(engine, admission, workers, store_kind=store.kind, delivery=settings.delivery)
    inference = InferenceServicer(admission, prefixes, RequestList(engine, admission), stats)
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, gate.services)
    cluster_pb2_grpc.add_ClusterServicer_to_server(ClusterServicer(workers), gate.services)
    gate.open()
    if hot is None:
        await server.start()
    for ready in ("", CLUSTER, JOURNAL):
        await server.set_serving(ready, True)
    journal.health.on_change = lambda degraded: readiness.announce(JOURNAL, not degraded)
    if not store.durable:
        log.warning("NOT DURABLE: the journal is in memory, and accepted requests die with this process")
    if settings.delivery == "relaxed":
        log.warning("relaxed delivery: clients may see output that a later scheduler has to compute again")
    event = "listening" if hot is None else "leading"
    log.info(event, address=address, store=store.kind, durability=store.durability, epoch=epoch)
    running = [asyncio.create_task(each) for each in (journal.run(), records.run(), workers.watch())]
    running.append(keeping_lease)
    running.append(asyncio.create_task(full_collections.tend(lambda: len(engine.sampling_of) + recovery.num_waiting)))
    successors: list[str] = []
    is_drained = False
    try:
        await unless_failed(end.wait(), (fatal, *running))
        await readiness.close(INFERENCE)
        keeper.close()
        successors = await lease.standbys()
        if successors:  # one that is told to end together with us leaves now
            await unless_failed(asyncio.sleep(_LEAVE_S), (fatal, *running))
            successors = await lease.standbys()
        if successors:
            log.info("handing over", live=len(engine.live), to=successors)
            await readiness.close(CLUSTER)
            gate.close(successors[0])
        else:
            await unless_failed(_drain(engine, admission, settings.drain_timeout_s), (fatal, *running))
            is_drained = True
    finally:
        admission.closed = admission.readers.closed = True
        await readiness.close(INFERENCE)
        keeper.close()
        await recovery.close()
        await workers.close()
        if successors and await journal.hand_over():
            log.info("handed over", epoch=epoch)
        await journal.close()
        await lease.release()
        if not is_drained:  # else they end by themselves
            gate.end_streams()
        await server.stop(1.0)
        await records.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)  # what went wrong first is raised already
        log.info("scheduler ended")


async def _before(end: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Does the work. None, and it is given up, if the end comes first."""
    task, ending_ = asyncio.create_task(work), asyncio.create_task(end.wait())
    try:
        await asyncio.wait([task, ending_], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, ending_):
            each.cancel()
        await asyncio.gather(task, ending_, return_exceptions=True)


def _new_attempt(store: Store, me: Lease, settings: SchedulerSettings) -> Attempt:
    journal = Journal(store, leader_id=me.leader_id, restate_entries=settings.restate_entries)
    records = Records(store, limits=_record_limits(settings))
    engine = Engine(
        Scheduler(_scheduler_config(settings)),
        journal,
        records,
        delivery=settings.delivery,
        stream_interval_s=settings.stream_interval_ms / 1000,
    )
    readers = Readers(engine, grace_s=settings.disconnect_grace_s)
    recovery = Recovery(engine, readers, model_patience_s=settings.model_patience_s)
    return Attempt(journal=journal, records=records, engine=engine, readers=readers, recovery=recovery)


async def _drain(engine: Engine, admission: Admission, timeout_s: float) -> None:
    """Refuses what is new, and lets end what runs and what is on its way in."""
    admission.readers.closed = True
    log.info("draining", live=len(engine.live))
    try:
        async with asyncio.timeout(timeout_s):
            await admission.close()
            await engine.wait_until_empty()
    except TimeoutError:
        log.warning("requests left unfinished in the journal", live=len(engine.live))


def _scheduler_config(settings: SchedulerSettings) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_batched_tokens=settings.max_batched_tokens or _MOST_BATCHED_TOKENS,
        max_num_seqs=settings.max_num_seqs,
        watermark=settings.watermark,
        pipeline_depth=1 if settings.step_form == "whole" else settings.pipeline_depth,
        enable_prefix_cache=settings.prefix_cache,
        order=settings.order,
        priority_patience_s=settings.priority_patience_s,
        preemption=settings.preemption,
        preempt_every=settings.preempt_every,
    )


def _admission_limits(settings: SchedulerSettings) -> AdmissionLimits:
    return AdmissionLimits(
        max_queue_requests=settings.max_queue_requests,
        max_queue_tokens=settings.max_queue_tokens,
        max_queue_wait_s=settings.max_queue_wait_ms / 1000,
        max_queue_share=settings.max_queue_share,
        max_paused_requests=settings.max_paused_requests,
        max_paused_tokens=settings.max_paused_tokens,
        max_paused_share=settings.max_paused_share,
        max_requests_per_session=settings.max_requests_per_session,
    )


def _record_limits(settings: SchedulerSettings) -> RecordLimits:
    most = settings.max_record_mb << 20 or 1 << 50
    return RecordLimits(
        ttl_s=settings.record_ttl_s, max_bytes=most, max_tenant_bytes=int(most * settings.max_record_share)
    )


def _pin_limits(settings: SchedulerSettings) -> PinLimits:
    return PinLimits(
        max_per_tenant=settings.max_pins_per_tenant,
        max_share=settings.max_pinned_share,
        max_share_per_tenant=settings.max_pinned_share_per_tenant,
    )


if __name__ == "__main__":
    end_after(main)
