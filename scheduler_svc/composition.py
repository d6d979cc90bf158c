"""Composition of a scheduler: its parts, and how they are built from the settings. Starts nothing."""

import asyncio
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from common.access import accepted_keys, server_credentials
from common.address import advertised_address
from common.metrics_listener import listen_for_scrapes
from common.open_files import allow_connections
from common.peer_tls import PeerTls, peer_tls_of
from common.rpc import Keepalive
from common.serving import GrpcServer
from quire.rpc import PUBLIC_MESSAGE_BYTES
from quire.scheduler_settings import SchedulerSettings
from quire.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from scheduler_svc.api.cluster_servicer import ClusterServicer
from scheduler_svc.api.inference_servicer import InferenceServicer
from scheduler_svc.api.leader_gate import LeaderGate
from scheduler_svc.api.metrics import SchedulerMetrics
from scheduler_svc.api.readiness import Readiness, SharedHealth
from scheduler_svc.api.shard_gates import ShardGates
from scheduler_svc.api.stats import StatsReporter
from scheduler_svc.api.topology import topology_handler
from scheduler_svc.api.worker_shares import WorkerShares
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.gc_gate import GcGate
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.keys import deployment_of
from scheduler_svc.journal.leases import Lease, Leases
from scheduler_svc.journal.open_store import open_tail
from scheduler_svc.journal.records import Records
from scheduler_svc.journal.store import Store
from scheduler_svc.leadership.hot_journal import HotJournal
from scheduler_svc.leadership.settling import Settling
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
from scheduler_svc.requests.live.cache_summary import CacheSummary
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.readers import Readers
from scheduler_svc.requests.prefixes.prefix_keeper import PrefixKeeper
from scheduler_svc.requests.prefixes.prefix_requests import Prefixes
from scheduler_svc.requests.recovery.recovery import Recovery
from scheduler_svc.requests.request_control import RequestControl
from scheduler_svc.requests.request_list import RequestList
from scheduler_svc.requests.shard_rule import ShardRule
from scheduler_svc.workers.worker_link import WorkerLink
from scheduler_svc.workers.workers import Workers

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
CLUSTER = cluster_pb2.DESCRIPTOR.services_by_name["Cluster"].full_name

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Parts that a process has once, for all of its shards. `watch`: None if there can be but one, in memory.

    `num_live` has the number of live sequences of each shard that is led or stood by for.
    """

    settings: SchedulerSettings
    watch: ShardWatch | None
    gates: ShardGates
    server: GrpcServer
    health: SharedHealth
    address: str
    me: Lease
    peer_tls: PeerTls | None
    gc_gate: GcGate
    metrics: SchedulerMetrics
    num_live: dict[int, Callable[[], int]]
    opened: asyncio.Event = field(default_factory=asyncio.Event)  # the server is

    @property
    def is_several(self) -> bool:
        """True if there are several shards, or may have been."""
        return self.watch is not None and self.watch.is_several

    @property
    def is_ending(self) -> bool:
        """True if a life that ends is the end of this process; else the shard is forgotten, or led by another one."""
        return self.watch is None or self.watch.has_ended

    @property
    def is_standby(self) -> bool:
        """True if the scheduler stands by before it leads: with several shards each one does."""
        return self.settings.standby or self.is_several

    def num_sequences(self) -> int:
        """Live sequences of all shards."""
        return sum(count() for count in self.num_live.values())

    def close_shard(self, shard: int) -> None:
        """Forget a shard that this process has to do with no more."""
        for each in (self.gates.gates, self.metrics.snapshots, self.num_live):
            each.pop(shard, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Parts of a scheduler for its shard, leading or not. `hot`: the journal that a standby follows."""

    door: Door
    shard: int
    gate: LeaderGate
    store: Store
    taking_over: TakeOver
    hot: HotJournal | None  # None: this is no standby


@dataclass(slots=True, kw_only=True)
class LeaderParts:
    """Parts of the scheduler that leads. `fatal` raises what ends it; `running` are its tasks until the end."""

    leading: Leading
    admission: Admission
    control: RequestControl
    cached: CacheSummary | None  # None: there can be but one shard, or nothing is cached
    settling: Settling
    keeper: PrefixKeeper
    workers: Workers
    shares: WorkerShares | None  # None: there can be but one shard
    readiness: Readiness
    fatal: "asyncio.Future[None]"
    running: "list[asyncio.Task[None]]"
    successors: list[str] = field(default_factory=list)
    is_leaving: bool = False
    is_drained: bool = False


def open_door(settings: SchedulerSettings, watch: ShardWatch | None) -> Door:
    """Build the server, bound but not started. Raises ListenError, AccessError."""
    if watch is not None:
        gates = ShardGates((INFERENCE, CLUSTER), watch.leader_of, watch.takes_requests)
    else:
        gates = ShardGates((INFERENCE, CLUSTER), lambda shard: None)
    most_connections = allow_connections(settings.max_connections, option="--max-connections")
    server = GrpcServer(
        (INFERENCE, CLUSTER),
        PUBLIC_MESSAGE_BYTES,
        slow_reader_timeout_s=settings.slow_reader_timeout_s,
        keepalive=Keepalive(time_s=settings.keepalive_time_s, timeout_s=settings.keepalive_timeout_s),
        limits=replace(edge_limits(settings), max_connections=most_connections),
        keys=accepted_keys(settings),
        credentials=server_credentials(settings),
    )
    server.grpc.add_generic_rpc_handlers((topology_handler(watch), gates))
    address = server.bind(settings.listen)
    me = Lease(f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}", advertised_address(address, settings.advertise))
    gates.address = me.address
    metrics = SchedulerMetrics()
    if settings.metrics_listen is not None:
        log.info("metrics", address=listen_for_scrapes(settings.metrics_listen, metrics.read))
    return Door(
        settings=settings,
        watch=watch,
        gates=gates,
        server=server,
        health=SharedHealth(server),
        address=address,
        me=me,
        peer_tls=peer_tls_of(settings),
        gc_gate=GcGate(),
        metrics=metrics,
        num_live={},
    )


def compose(door: Door, store: Store, leases: Leases, shard: int) -> Parts:
    """Build the way to the leadership of a shard."""
    settings, me = door.settings, door.me
    gate = door.gates.gates[shard] = LeaderGate((INFERENCE, CLUSTER))
    hot = standby = None
    if door.is_standby:
        tail = open_tail(settings.store, deployment=deployment_of(settings.deployment, shard))
        hot = HotJournal(tail, store, record_ttl_s=settings.record_ttl_s)
        standby = Standby(leases, me, hot, lease_ms=settings.lease_ms, on_leader=gate.set_leader)
    taking_over = TakeOver(
        partial(_new_attempt, store, me, settings),
        store,
        leases,
        me,
        lease_ms=settings.lease_ms,
        store_timeout_s=settings.store_timeout_s,
        standby=standby,
        hot=hot,
        gives_way=settings.gives_way,
    )
    return Parts(door=door, shard=shard, gate=gate, store=store, taking_over=taking_over, hot=hot)


def compose_leader(parts: Parts, leading: Leading) -> LeaderParts:
    """Build the parts that serve clients and workers, and register their services behind the gate."""
    door, store, attempt = parts.door, parts.store, leading.attempt
    settings = door.settings
    engine, recovery, limits = attempt.engine, attempt.recovery, admission_limits(settings)
    shard_rule = cached = None
    if door.watch is not None:
        shard_rule = ShardRule(parts.shard, door.watch, asyncio.get_running_loop().time())
        if settings.prefix_cache:
            cached = CacheSummary(parts.shard, engine.scheduler.workers)
    control = RequestControl(engine, recovery, limits, shard_rule=shard_rule)
    admission = Admission(engine, limits, attempt.readers, recovery, control, cached=cached, shard_rule=shard_rule)
    keeper = PrefixKeeper(engine, admission.in_flight_admissions_still_fit)
    if settings.prefix_cache:
        keeper.restore(recovery.pins)
    elif recovery.pins:
        log.warning("pins are forgotten, since prefix_cache is off", num_pins=len(recovery.pins))
        recovery.forget_pins()
    prefixes = Prefixes(admission, keeper, pin_limits(settings), is_enabled=settings.prefix_cache)
    fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    readiness = Readiness(door.health.part(parts.shard))
    workers = Workers(
        engine,
        admission,
        keeper,
        epoch=leading.epoch,
        send_whole=settings.step_form == "whole",
        decide=settings.decide,
        only_model=settings.only_model,
        model_patience_s=settings.model_patience_s,
        make_link=partial(WorkerLink, tls=door.peer_tls),
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
    door.metrics.snapshots[parts.shard] = stats
    requests = RequestList(engine, admission)
    inference = InferenceServicer(admission, control, prefixes, requests, stats, parsers_given(settings))
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, parts.gate.services)
    shares = None
    if door.watch is not None:
        shares = WorkerShares(parts.shard, door.watch, workers.members, engine.scheduler.workers.num_sequences_on)
    cluster_pb2_grpc.add_ClusterServicer_to_server(ClusterServicer(workers, shares, door.watch), parts.gate.services)
    return LeaderParts(
        leading=leading,
        admission=admission,
        control=control,
        cached=cached,
        settling=Settling(settings.record_ttl_s),
        keeper=keeper,
        workers=workers,
        shares=shares,
        readiness=readiness,
        fatal=fatal,
        running=[leading.keeping_lease],
    )


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
