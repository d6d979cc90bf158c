"""Entry point of the scheduler: read the settings, choose the shard, serve until told to end."""

import asyncio
import gc
import secrets
import sys
from collections.abc import Sequence

import structlog

import common.grpc_poller  # noqa: F401 - before gRPC is loaded
from common.access import AccessError
from common.log import set_up_service_logging
from common.process import end_after, run_service, stop_event, unless_failed
from common.refusal import refuse_to_start
from common.serving import ListenError
from common.settings import settings_or_exit
from common.status import Status
from common.waits import end_tasks
from quire.scheduler_settings import SchedulerSettings
from quire.settings import names_given, to_toml
from quire.time_slice import shorten_slice
from scheduler_svc.composition import Door, compose, compose_leader, is_standby, open_door
from scheduler_svc.journal.keys import deployment_of
from scheduler_svc.journal.leases import Leases
from scheduler_svc.journal.open_store import open_leases, open_shard_leases, open_store, open_tail
from scheduler_svc.journal.store import FencedError, Store, StoreError
from scheduler_svc.leadership.shard_watch import ShardWatch
from scheduler_svc.life import before, end_leading, lead, stand_by
from scheduler_svc.workers.worker_loop import SupersededError

log = structlog.get_logger()


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
    store = await before(end, _open_store(settings, 0))
    if store is None:
        log.info("scheduler ended", reason="told to end while it waited for the store")
        return
    shards: Sequence[Leases]
    watch = None
    if settings.shards > 1:
        names = [deployment_of(settings.deployment, shard) for shard in range(settings.shards)]
        shards = watched = open_shard_leases(settings.store, deployments=names, lease_ms=settings.lease_ms)
        watch = ShardWatch(watched, lease_ms=settings.lease_ms)
    else:
        shards = [open_leases(settings.store, deployment=settings.deployment, lease_ms=settings.lease_ms)]
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


async def _serve_shards(door: Door, store: Store, shards: Sequence[Leases], end: asyncio.Event) -> None:
    """Stand by for one shard and lead it; until then, go to another one that needs a leader more."""
    settings, watch, turn = door.settings, door.watch, secrets.randbelow(1 << 16)
    while True:
        shard = 0
        if watch is not None:
            chosen = await before(end, watch.choose(turn))
            if chosen is None:
                break
            shard = chosen
        own = store if shard == 0 else await before(end, _open_store(settings, shard))
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


async def _open_store(settings: SchedulerSettings, shard: int) -> Store:
    deployment = deployment_of(settings.deployment, shard)
    return await open_store(settings.store, deployment=deployment, patience_s=settings.store_timeout_s)


if __name__ == "__main__":
    end_after(main)
