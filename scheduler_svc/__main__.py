"""Composition root of the scheduler: read the settings, build the parts, serve until told to end."""

import asyncio
import gc
import secrets
import socket
import sys
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import structlog

import common.grpc_poller  # noqa: F401 - before gRPC is loaded
from common.access import AccessError, accepted_keys, server_credentials
from common.address import advertised_address
from common.log import set_up_service_logging
from common.metrics_listener import listen_for_scrapes
from common.process import end_after, run_service, stop_event, unless_failed
from common.refusal import refuse_to_start
from common.rpc import Keepalive
from common.serving import GrpcServer, ListenError
from common.settings import settings_or_exit
from common.status import Status
from common.waits import end_tasks
from quire.rpc import PUBLIC_MESSAGE_BYTES
from quire.scheduler_settings import SchedulerSettings
from quire.settings import names_given, to_toml
from quire.time_slice import shorten_slice
from quire.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from scheduler_svc.api.cluster_servicer import ClusterServicer
from scheduler_svc.api.inference_servicer import InferenceServicer
from scheduler_svc.api.leader_gate import LeaderGate
from scheduler_svc.api.metrics import SchedulerMetrics
from scheduler_svc.api.readiness import Readiness
from scheduler_svc.api.stats import StatsReporter
from scheduler_svc.api.topology import topology_handler
from scheduler_svc.api.worker_shares import WorkerShares
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.gc_gate import GcGate
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.keys import deployment_of
from scheduler_svc.journal.leases import Lease, Leases
from scheduler_svc.journal.open_store import open_leases, open_store, open_tail
from scheduler_svc.journal.records import Records
from scheduler_svc.journal.store import FencedError, Store, StoreError
from scheduler_svc.leadership.hot_journal import HotJournal
from scheduler_svc.leadership.shard_watch import ShardWatch
from scheduler_svc.leadership.standby import Standby
from scheduler_svc.leadership.take_over import Attempt, Leading, TakeOver
from scheduler_svc.part_settings import (
    admission_limits,
    edge_limits,
    parsers_given,
    pin_limits,
    record_limits,
    scheduler_config,
)
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.readers import Readers
from scheduler_svc.requests.prefixes.prefix_keeper import PrefixKeeper
from scheduler_svc.requests.prefixes.prefix_requests import Prefixes
from scheduler_svc.requests.recovery.recovery import Recovery
from scheduler_svc.requests.request_control import RequestControl
from scheduler_svc.requests.request_list import RequestList
from scheduler_svc.workers.worker_loop import SupersededError
from scheduler_svc.workers.workers import Workers

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
CLUSTER = cluster_pb2.DESCRIPTOR.services_by_name["Cluster"].full_name
JOURNAL = "quire.v1.Journal"  # by health alone

_PUBLISH_S = 0.5
_LEAVE_S = 0.2  # for a standby to say that it is gone; meanwhile we lead on

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
    shorten_slice()
    try:
        run_service(serve(settings))
    except (SupersededError, FencedError) as error:
        log.error("scheduler ends", reason=str(error))
        raise SystemExit(1) from None
    except (AccessError, ListenError, StoreError) as error:
        refuse_to_start("scheduler", str(error), names)


async def serve(settings: SchedulerSettings) -> None:
    """Serve until SIGTERM.

    Raises AccessError, ListenError, StoreError, and SupersededError if a newer scheduler took over.
    """
    if is_standby(settings):
        open_tail(settings.store, deployment=settings.deployment)  # says so at once if there can be none
    end = stop_event(settings.parent_pipe_fd)
    store = await _before(end, _open_store(settings, 0))
    if store is None:
        log.info("scheduler ended", reason="told to end while it waited for the store")
        return
    shards = [_open_leases(settings, shard) for shard in range(settings.shards)]
    watch = ShardWatch(shards, lease_ms=settings.lease_ms) if settings.shards > 1 else None
    watching = asyncio.create_task(watch.run()) if watch is not None else None
    try:
        door = open_door(settings, watch)
        await unless_failed(_serve_shards(door, store, shards, end), () if watching is None else (watching,))
    finally:
        if watching is not None:
            await end_tasks(watching)
        for leases in shards:
            await leases.close()
        await store.close()


async def _serve_shards(door: "Door", store: Store, shards: Sequence[Leases], end: asyncio.Event) -> None:
    """Stand by for one shard and lead it; until then, go to another one that needs a leader more."""
    settings, watch, turn = door.settings, door.watch, secrets.randbelow(1 << 16)
    while True:
        shard = 0
        if watch is not None:
            chosen = await _before(end, watch.choose(turn))
            if chosen is None:
                break
            shard = chosen
        own = store if shard == 0 else await _before(end, _open_store(settings, shard))
        if own is None:
            break
        try:
            parts = compose(door, own, shards[shard], shard)
            leading = await stand_by(parts, end)
            if leading is not None:
                leader = compose_leader(parts, leading)
                try:
                    await lead(parts, leader, end)
                finally:
                    await end_leading(parts, leader)
                return
        finally:
            if own is not store:
                await own.close()
        if end.is_set():
            break
    await door.server.stop(0)
    log.info("scheduler ended")


def is_standby(settings: SchedulerSettings) -> bool:
    """True if the scheduler stands by before it leads: with several shards each one does."""
    return settings.standby or settings.shards > 1


@dataclass(slots=True, kw_only=True)
class Door:
    """The server of a scheduler and what stands before its services. `watch`: of several shards; None: there is one."""

    settings: SchedulerSettings
    watch: ShardWatch | None
    gate: LeaderGate
    server: GrpcServer
    address: str
    me: Lease
    gc_gate: GcGate
    metrics: SchedulerMetrics
    is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Parts of a scheduler for its shard, leading or not. `hot`: the journal that a standby follows."""

    door: Door
    shard: int
    store: Store
    taking_over: TakeOver
    hot: HotJournal | None  # None: this is no standby


@dataclass(slots=True, kw_only=True)
class LeaderParts:
    """Parts of the scheduler that leads. `fatal` raises what ends it; `running` are its tasks until the end."""

    leading: Leading
    admission: Admission
    keeper: PrefixKeeper
    workers: Workers
    readiness: Readiness
    fatal: "asyncio.Future[None]"
    running: "list[asyncio.Task[None]]"
    successors: list[str] = field(default_factory=list)
    is_leaving: bool = False
    is_drained: bool = False


def open_door(settings: SchedulerSettings, watch: ShardWatch | None) -> Door:
    """Build the server, bound but not started. Raises ListenError, AccessError."""
    gate = LeaderGate((INFERENCE, CLUSTER), watch.leader_of if watch is not None else lambda shard: None)
    server = GrpcServer(
        (INFERENCE, CLUSTER),
        PUBLIC_MESSAGE_BYTES,
        slow_reader_timeout_s=settings.slow_reader_timeout_s,
        keepalive=Keepalive(time_s=settings.keepalive_time_s, timeout_s=settings.keepalive_timeout_s),
        limits=edge_limits(settings),
        keys=accepted_keys(settings),
        credentials=server_credentials(settings),
    )
    server.grpc.add_generic_rpc_handlers((topology_handler(watch), gate))
    address = server.bind(settings.listen)
    metrics = SchedulerMetrics()
    if settings.metrics_listen is not None:
        log.info("metrics", address=listen_for_scrapes(settings.metrics_listen, metrics.read))
    return Door(
        settings=settings,
        watch=watch,
        gate=gate,
        server=server,
        address=address,
        me=Lease(f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}", advertised_address(address, settings.advertise)),
        gc_gate=GcGate(),
        metrics=metrics,
    )


def compose(door: Door, store: Store, leases: Leases, shard: int) -> Parts:
    """Build the way to the leadership of a shard."""
    settings, me = door.settings, door.me
    door.gate.shard = shard
    hot = standby = None
    if is_standby(settings):
        tail = open_tail(settings.store, deployment=deployment_of(settings.deployment, shard))
        hot = HotJournal(tail, store, record_ttl_s=settings.record_ttl_s)
        standby = Standby(leases, me, hot, lease_ms=settings.lease_ms, on_leader=door.gate.set_leader)
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
    return Parts(door=door, shard=shard, store=store, taking_over=taking_over, hot=hot)


async def stand_by(parts: Parts, end: asyncio.Event) -> Leading | None:
    """Wait until this process leads; a standby answers meanwhile with NOT_LEADER.

    None: it was told to end first, or another shard needs it more.
    """
    door = parts.door
    if parts.hot is not None and not door.is_open:
        door.is_open = True
        await door.server.start()
        await door.server.set_serving("", True)
        log.info("listening", address=door.address, store=parts.store.kind, standby=True)
    door.gc_gate.close()  # while the journal of earlier leaders is read
    elsewhere = () if door.watch is None else (door.watch.other_in_need(parts.shard, door.me.address),)
    try:
        return await _before(end, parts.taking_over.lead(), *elsewhere)
    finally:
        if parts.hot is not None:
            await parts.hot.close()


def compose_leader(parts: Parts, leading: Leading) -> LeaderParts:
    """Build the parts that serve clients and workers, and register their services behind the gate."""
    door, store, attempt = parts.door, parts.store, leading.attempt
    settings = door.settings
    engine, recovery, limits = attempt.engine, attempt.recovery, admission_limits(settings)
    control = RequestControl(engine, recovery, limits)
    admission = Admission(engine, limits, attempt.readers, recovery, control)
    keeper = PrefixKeeper(engine, admission.in_flight_admissions_still_fit)
    if settings.prefix_cache:
        keeper.restore(recovery.pins)
    elif recovery.pins:
        log.warning("pins are forgotten, since prefix_cache is off", num_pins=len(recovery.pins))
    prefixes = Prefixes(admission, keeper, pin_limits(settings), is_enabled=settings.prefix_cache)
    fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    readiness = Readiness(door.server)
    workers = Workers(
        engine,
        admission,
        keeper,
        epoch=leading.epoch,
        send_whole=settings.step_form == "whole",
        decide=settings.decide,
        only_model=settings.only_model,
        model_patience_s=settings.model_patience_s,
        on_change=partial(readiness.announce, INFERENCE),
        on_fatal=lambda error: None if fatal.done() else fatal.set_exception(error),
        longer=leading.lease.longer,
    )
    stats = StatsReporter(
        engine,
        admission,
        workers,
        store_kind=store.kind,
        delivery=settings.delivery,
        prefix_cache=settings.prefix_cache,
    )
    door.metrics.snapshot = stats
    requests = RequestList(engine, admission)
    inference = InferenceServicer(admission, control, prefixes, requests, stats, parsers_given(settings))
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, door.gate.services)
    shares = None
    if door.watch is not None:
        shares = WorkerShares(parts.shard, door.watch, workers, engine.scheduler.workers.num_sequences_on)
    cluster_pb2_grpc.add_ClusterServicer_to_server(ClusterServicer(workers, shares), door.gate.services)
    return LeaderParts(
        leading=leading,
        admission=admission,
        keeper=keeper,
        workers=workers,
        readiness=readiness,
        fatal=fatal,
        running=[leading.keeping_lease],
    )


async def lead(parts: Parts, leader: LeaderParts, end: asyncio.Event) -> None:
    """Serve until told to end; then hand over to a standby, or drain if there is none. Raises what ends it before."""
    attempt, lease = leader.leading.attempt, leader.leading.lease
    engine, journal, recovery = attempt.engine, attempt.journal, attempt.recovery
    door = parts.door
    door.gate.open()
    if parts.hot is None:
        await door.server.start()
    for ready in ("", CLUSTER, JOURNAL):
        await door.server.set_serving(ready, True)
    journal.health.on_change = lambda degraded: leader.readiness.announce(JOURNAL, not degraded)
    _log_leading(parts, leader.leading.epoch)
    gating = door.gc_gate.run(lambda: len(engine.sampling_of) + recovery.num_waiting)
    tasks = (journal.run(), attempt.records.run(), leader.workers.watch(), gating)
    leader.running += [asyncio.create_task(each) for each in tasks]
    if door.watch is not None:
        leader.running.append(asyncio.create_task(_publish_load(parts, leader, door.watch)))
    await unless_failed(end.wait(), (leader.fatal, *leader.running))
    await leader.readiness.close(INFERENCE)
    leader.keeper.close()
    leader.is_leaving = True
    leader.successors = await lease.standbys()
    if leader.successors:  # one that is told to end together with us leaves now
        await unless_failed(asyncio.sleep(_LEAVE_S), (leader.fatal, *leader.running))
        leader.successors = await lease.standbys()
    if not leader.successors:
        draining = asyncio.create_task(_drain(engine, leader.admission, door.settings.drain_timeout_s))
        others = () if door.watch is None else (asyncio.create_task(_until_succeeded(leader)),)
        await unless_failed(_first(draining, *others), (leader.fatal, *leader.running))
        leader.is_drained = not leader.successors
    if leader.successors:
        log.info("handing over", live=len(engine.live), to=leader.successors)
        await leader.readiness.close(CLUSTER)
        door.gate.close(leader.successors[0])


async def _until_succeeded(leader: LeaderParts) -> None:
    """Return when a scheduler has come to stand by for this shard."""
    while not leader.successors:
        await asyncio.sleep(_PUBLISH_S / 2)
        leader.successors = await leader.leading.lease.standbys()


async def _first(*tasks: "asyncio.Task[None]") -> None:
    """Return when the first of these has ended, and end the others. Raises its error."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await end_tasks(*tasks)
    for task in done:
        task.result()


async def end_leading(parts: Parts, leader: LeaderParts) -> None:
    """Close all parts in order: readers, workers, journal, lease, server, records."""
    attempt, lease = leader.leading.attempt, leader.leading.lease
    leader.admission.closed = attempt.readers.closed = True
    await leader.readiness.close(INFERENCE)
    leader.keeper.close()
    await attempt.recovery.close()
    await leader.workers.close()
    if leader.successors and await attempt.journal.hand_over():
        log.info("handed over", epoch=leader.leading.epoch)
    await attempt.journal.close()
    await lease.release()
    if not leader.is_drained:  # else they end by themselves
        parts.door.gate.end_streams()
    await parts.door.server.stop(1.0)
    await attempt.records.close()
    await end_tasks(*leader.running)  # the first error is raised already
    log.info("scheduler ended")


def _log_leading(parts: Parts, epoch: int) -> None:
    if not parts.store.durable:
        log.warning("NOT DURABLE: the journal is in memory, and accepted requests die with this process")
    if parts.door.settings.delivery == "relaxed":
        log.warning("relaxed delivery: clients may see output that a later scheduler has to compute again")
    event = "listening" if parts.hot is None else "leading"
    store = parts.store
    where = {} if parts.door.watch is None else {"shard": parts.shard}
    log.info(event, address=parts.door.address, store=store.kind, durability=store.durability, epoch=epoch, **where)


async def _publish_load(parts: Parts, leader: LeaderParts, watch: ShardWatch) -> None:
    """Publish what this leader says of its shard, again and again."""
    scheduler = leader.leading.attempt.engine.scheduler
    while True:
        stats = scheduler.stats()
        await watch.publish(
            cluster_pb2.Shard(
                number=parts.shard,
                leader=parts.door.me.address,
                epoch=leader.workers.epoch,
                num_workers=len(leader.workers.driven),
                num_running=sum(each.num_running_groups for each in stats.workers),
                num_waiting=stats.num_waiting_groups,
                is_leaving=leader.is_leaving,
            )
        )
        await asyncio.sleep(_PUBLISH_S)


async def _before(
    end: asyncio.Event, work: Coroutine[Any, Any, Result], *others: Coroutine[Any, Any, None]
) -> Result | None:
    """Result of the work; None, and the work is cancelled, if `end` is set or one of `others` returns first."""
    task = asyncio.create_task(work)
    ending = [asyncio.create_task(each) for each in (end.wait(), *others)]
    try:
        await asyncio.wait([task, *ending], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await end_tasks(task, *ending)


async def _open_store(settings: SchedulerSettings, shard: int) -> Store:
    deployment = deployment_of(settings.deployment, shard)
    return await open_store(settings.store, deployment=deployment, patience_s=settings.store_timeout_s)


def _open_leases(settings: SchedulerSettings, shard: int) -> Leases:
    deployment = deployment_of(settings.deployment, shard)
    return open_leases(settings.store, deployment=deployment, lease_ms=settings.lease_ms)


def _new_attempt(store: Store, me: Lease, settings: SchedulerSettings) -> Attempt:
    lease_s = settings.lease_ms / 1000
    journal = Journal(store, leader_id=me.leader_id, restate_entries=settings.restate_entries, lease_s=lease_s)
    records = Records(store, limits=record_limits(settings))
    engine = Engine(
        Scheduler(scheduler_config(settings)),
        journal,
        records,
        delivery=settings.delivery,
        stream_interval_s=settings.stream_interval_ms / 1000,
    )
    readers = Readers(engine, grace_s=settings.disconnect_grace_s)
    recovery = Recovery(engine, readers, model_patience_s=settings.model_patience_s)
    return Attempt(journal=journal, records=records, engine=engine, readers=readers, recovery=recovery)


async def _drain(engine: Engine, admission: Admission, timeout_s: float) -> None:
    """Refuse new requests; wait for the end of those that run or are on their way in."""
    admission.readers.closed = True
    log.info("draining", live=len(engine.live))
    try:
        async with asyncio.timeout(timeout_s):
            await admission.close()
            await engine.wait_until_empty()
    except TimeoutError:
        log.warning("requests left unfinished in the journal", live=len(engine.live))


if __name__ == "__main__":
    end_after(main)
