"""Entry point of the scheduler: read the settings, choose the shard, serve until told to end."""

import common.missing_extra

# isort: split
import asyncio
import gc
import sys

import structlog

import common.grpc_environment  # noqa: F401 - before gRPC is loaded
from common.access import AccessError
from common.log import set_up_service_logging
from common.process import end_after, run_service, stop_event
from common.refusal import refuse_to_start
from common.settings import settings_or_exit
from common.status import Status
from common.waits import before, end_tasks, unless_failed
from quire.listening import ListenError
from quire.redaction import without_passwords
from quire.scheduler_settings import SchedulerSettings
from quire.settings import names_given, to_toml
from quire.time_slice import shorten_slice
from scheduler_svc.composition import open_door
from scheduler_svc.journal.open_store import MEMORY_URL, open_leases, open_tail
from scheduler_svc.journal.shard_store import ShardStore
from scheduler_svc.journal.store import FencedError, StoreError, StoreUnavailableError
from scheduler_svc.leadership.shard_watch import open_watch
from scheduler_svc.life import open_server, serve_shard
from scheduler_svc.shard_lives import ShardLives, open_shard_store
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
    is_shared = settings.store != MEMORY_URL
    if settings.standby or settings.shards > 1:
        open_tail(settings.store, deployment=settings.deployment)  # says so at once if there can be none
    end = stop_event(settings.parent_pipe_fd)
    store = await before(open_shard_store(settings, 0), end.wait())
    if store is None:
        log.info("scheduler ended", reason="told to end while it waited for the store")
        return
    watch = None
    running: list[asyncio.Task[None]] = []
    try:
        if is_shared:
            shards = ShardStore(settings.store, deployment=settings.deployment, lease_ms=settings.lease_ms)
            opening = open_watch(
                shards, settings.shards, lease_ms=settings.lease_ms, patience_s=settings.store_timeout_s
            )
            watch = await before(opening, end.wait())
            if watch is None:
                await shards.close()
                log.info("scheduler ended", reason="told to end while it waited for the number of shards")
                return
        door = open_door(settings, watch)
        if door.is_standby:
            await open_server(door)
            log.info("listening", address=door.address, store=store.kind, standby=True)
        running.append(asyncio.create_task(door.gc_gate.run(door.num_sequences)))
        if watch is None:
            leases = open_leases(settings.store, deployment=settings.deployment, lease_ms=settings.lease_ms)
            await unless_failed(serve_shard(door, 0, store, leases, end), running)
        else:
            running.append(asyncio.create_task(watch.run(door.me.address)))
            await unless_failed(ShardLives(door, watch, store).run(end), running)
        await door.server.stop(1.0)
        log.info("scheduler ended")
    except StoreUnavailableError as error:
        raise type(error)(f"the store at {without_passwords(settings.store)}: {error.message}") from error
    finally:
        await end_tasks(*running)
        if watch is not None:
            await watch.close()
        await store.close()


if __name__ == "__main__":
    end_after(main)
