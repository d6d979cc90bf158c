"""The life of a scheduler with a shard: it stands by, leads, hands over or drains, and ends. Builds no part itself."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import structlog

from common.waits import before, end_tasks, unless_failed
from quire.v1 import cluster_pb2, journal_pb2
from scheduler_svc.composition import CLUSTER, INFERENCE, Door, LeaderParts, Parts, compose, compose_leader
from scheduler_svc.journal.keys import deployment_of
from scheduler_svc.journal.leases import Leases
from scheduler_svc.journal.open_store import open_tail
from scheduler_svc.journal.store import Store, StoreUnavailableError
from scheduler_svc.leadership.shard_watch import ShardWatch
from scheduler_svc.leadership.take_over import Leading
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.prefixes.pin_copies import PinCopies, read_pins

JOURNAL = "quire.v1.Journal"  # by health alone

_PUBLISH_S = 0.25
_CACHED_S_EACH = 0.02  # times the number of shards: each scheduler reads the summaries of all shards
_LINGER_S = 0.2  # for calls on their way: gRPC ends those that a server has not begun with CANCELLED
_READING = 1 << 30  # sequences, as far as garbage is concerned: journals are read meanwhile
_LEAVE_S = 0.2  # for a standby to say that it is gone; meanwhile we lead on

log = structlog.get_logger()


async def serve_shard(door: Door, shard: int, store: Store, leases: Leases, end: asyncio.Event) -> None:
    """Stand by for a shard and lead it, until told to end.

    Raises StoreError, and SupersededError or FencedError if another scheduler took over.
    """
    parts = compose(door, store, leases, shard)
    door.num_live[shard] = lambda: _READING
    door.gc_gate.close()
    try:
        leading = await stand_by(parts, end)
        if leading is None:
            return
        leader = compose_leader(parts, leading)
        if door.watch is not None:
            with suppress(
                StoreUnavailableError
            ):  # it is read again soon; until then ids are not taken that may be known
                await door.watch.read_plan()
        try:
            await lead(parts, leader, end)
        finally:
            await end_leading(parts, leader)
    finally:
        door.close_shard(shard)


async def stand_by(parts: Parts, end: asyncio.Event) -> Leading | None:
    """Wait until this process leads; a standby answers meanwhile with NOT_LEADER. None if it is told to end first."""
    try:
        return await before(parts.taking_over.lead(), end.wait())
    finally:
        if parts.hot is not None:
            await parts.hot.close()


async def lead(parts: Parts, leader: LeaderParts, end: asyncio.Event) -> None:
    """Serve until told to end; then hand over to a standby, or drain if there is none. Raises what ends it before."""
    attempt, lease = leader.leading.attempt, leader.leading.lease
    engine, journal, recovery = attempt.engine, attempt.journal, attempt.recovery
    door, health = parts.door, parts.door.health.part(parts.shard)
    parts.gate.open()
    if parts.hot is None:
        await open_server(door)
    for ready in (CLUSTER, JOURNAL):
        health.set_serving(ready, True)
    journal.health.on_change = lambda degraded: leader.readiness.announce(JOURNAL, not degraded)
    _log_leading(parts, leader.leading.epoch)
    door.num_live[parts.shard] = lambda: len(engine.sampling_of) + recovery.num_waiting
    tasks = (journal.run(), attempt.records.run(), leader.workers.watch())
    leader.running += [asyncio.create_task(each) for each in tasks]
    if door.watch is not None:
        leader.running.append(asyncio.create_task(_publish_load(parts, leader, door.watch)))
        if parts.shard and door.settings.prefix_cache:
            leader.running.append(asyncio.create_task(_follow_pins(parts, leader, door.watch)))
    await unless_failed(end.wait(), (leader.fatal, *leader.running))
    leader.readiness.close(INFERENCE)
    leader.keeper.close()
    leader.is_leaving = True
    successors = await lease.standbys()
    if successors:  # one that is told to end together with us leaves now
        await unless_failed(asyncio.sleep(_LEAVE_S), (leader.fatal, *leader.running))
        successors = await lease.standbys()
    leader.successors = successors or []
    if not leader.successors:  # one may come meanwhile
        draining = _drain(engine, leader.admission, door.settings.drain_timeout_s)
        await unless_failed(before(draining, _until_succeeded(leader)), (leader.fatal, *leader.running))
        leader.is_drained = not leader.successors
    if leader.successors:
        log.info("handing over", live=len(engine.live), to=leader.successors)
        leader.readiness.close(CLUSTER)
        parts.gate.close(leader.successors[0])


async def end_leading(parts: Parts, leader: LeaderParts) -> None:
    """Close all parts in order: readers, workers, journal, lease, server, records."""
    attempt, lease = leader.leading.attempt, leader.leading.lease
    leader.admission.closed = attempt.readers.closed = True
    leader.readiness.close(INFERENCE)
    leader.keeper.close()
    await attempt.recovery.close()
    await leader.workers.close()
    if leader.successors and await attempt.journal.hand_over():
        log.info("handed over", epoch=leader.leading.epoch)
    await attempt.journal.close()
    await lease.release()
    if not leader.is_drained or not parts.door.is_ending:  # else they end by themselves
        parts.gate.end_streams()
        await asyncio.sleep(_LINGER_S)
    if not parts.door.is_several:  # else the process may have other shards
        await parts.door.server.stop(1.0)
    for ready in (CLUSTER, JOURNAL):
        leader.readiness.close(ready)
    await attempt.records.close()
    await end_tasks(*leader.running)  # the first error is raised already
    if parts.door.is_several:
        log.info("shard left", shard=parts.shard)


async def open_server(door: Door) -> None:
    """Start the server, unless it was: the process is healthy, its services are not yet."""
    if door.opened.is_set():
        return
    door.opened.set()
    await door.server.start()
    door.server.set_serving("", True)


async def _until_succeeded(leader: LeaderParts) -> None:
    """Return when a scheduler is seen to stand by for this shard."""
    while not leader.successors:
        await asyncio.sleep(_PUBLISH_S / 2)
        leader.successors = await leader.leading.lease.standbys() or []


def _log_leading(parts: Parts, epoch: int) -> None:
    if not parts.store.durable:
        log.warning("NOT DURABLE: the journal is in memory, and accepted requests die with this process")
    if parts.door.settings.delivery == "relaxed":
        log.warning("relaxed delivery: clients may see output that a later scheduler has to compute again")
    event = "listening" if parts.hot is None else "leading"
    store = parts.store
    where = {"shard": parts.shard} if parts.door.is_several else {}
    log.info(event, address=parts.door.address, store=store.kind, durability=store.durability, epoch=epoch, **where)


async def _publish_load(parts: Parts, leader: LeaderParts, watch: ShardWatch) -> None:
    """Publish what this leader says of its shard, again and again, once there are several."""
    await watch.several.wait()
    loop = asyncio.get_running_loop()
    cached, cached_until_s = cluster_pb2.CachedBeginnings(shard=parts.shard), loop.time()
    while True:
        if leader.cached is not None and loop.time() >= cached_until_s:
            cached = leader.cached.to_pb()
            cached_until_s = loop.time() + _CACHED_S_EACH * len(watch.shards)
        leader.settling.update(watch.plan, leader.control.present_ids, loop.time())
        is_kept = parts.shard < watch.num_wanted
        await watch.publish(_described(parts, leader, cached.version, is_kept=is_kept), cached)
        await asyncio.sleep(_PUBLISH_S)


async def _follow_pins(parts: Parts, leader: LeaderParts, watch: ShardWatch) -> None:
    """Make the pins of this shard those of shard 0, again and again, unless it was removed."""

    async def read_first() -> Sequence[journal_pb2.PinChange]:
        settings = parts.door.settings
        tail = open_tail(settings.store, deployment=deployment_of(settings.deployment, 0))
        try:
            return await read_pins(tail.read_after)
        finally:
            await tail.close()

    copies, loop = PinCopies(leader.keeper, read_first), asyncio.get_running_loop()
    while True:
        if parts.shard < watch.num_wanted:
            await copies.update(lambda: watch.first_pins_digest, loop.time())
        await asyncio.sleep(_PUBLISH_S)


def _described(parts: Parts, leader: LeaderParts, cache_version: int, *, is_kept: bool) -> cluster_pb2.Shard:
    """Load of the shard. `is_kept`: it is not removed, and so needs a worker that tells it the model."""
    needs_model = leader.admission.model is None and (is_kept or leader.admission.recovery.num_waiting > 0)
    scheduler = leader.leading.attempt.engine.scheduler
    stats = scheduler.stats()
    return cluster_pb2.Shard(
        number=parts.shard,
        leader=parts.door.me.address,
        epoch=leader.leading.attempt.journal.stats.epoch,  # as in the lease: later if the store has lost the journal
        num_workers=leader.workers.num_in_service,
        num_running=sum(each.num_running_groups for each in stats.workers),
        num_waiting=stats.num_waiting_groups + needs_model,
        is_leaving=leader.is_leaving,
        num_uncomputed_tokens=scheduler.num_uncomputed_tokens(),
        cache_version=cache_version,
        settled_version=leader.settling.settled_version,
        pins_digest=leader.keeper.digest,
        gives_to=leader.shares.gives_to() if leader.shares is not None else (),
    )


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
