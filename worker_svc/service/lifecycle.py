"""The life of a worker process: listen, load, register, serve, drain. The engine that executes steps is passed in."""

import asyncio
import gc
import os
import secrets
import socket
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import structlog

from common.address import advertised_address
from common.metrics_listener import listen_for_scrapes
from common.peer_tls import PeerTls
from common.process import stop_event
from common.rpc import CLUSTER_MESSAGE_BYTES
from common.serving import GrpcServer
from common.waits import before, unless_failed
from quire.credentials import Credentials
from quire.time_slice import restore_slice
from worker_svc.description import WorkerDescription
from worker_svc.loaded_model import LoadedModel
from worker_svc.service.block_reads import BlockReads
from worker_svc.service.block_source import GrpcBlockSource
from worker_svc.service.fetch_calls import FetchCalls
from worker_svc.service.registration import Registration, WorkerIdentity
from worker_svc.service.servicer import SERVICE_NAME, LoadedWorker, ServedBlocks, WorkerServicer, add_to_server
from worker_svc.service.worker_figures import WorkerFigures
from worker_svc.steps.executor import StepExecutor
from worker_svc.steps.step_runner import PassCountingRunner
from worker_svc.steps.task_thread import TaskThread

# Health of its own: SERVICE_NAME is served once the model is loaded, this once a leader has looked at the worker and
# opened its stream of steps. A rollout that waits for it replaces no worker by one that the schedulers refuse.
REGISTERED = f"{SERVICE_NAME}.Registered"
_STOP_GRACE_S = 1.0
_LAST_STEPS_S = 5.0  # at the end, for steps that were in flight when the drain timed out

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Addresses of a worker and its scheduler, and its limits for ending."""

    listen: str
    advertise: str | None
    scheduler: str | None
    worker_id: str | None
    parent_pipe_fd: int | None
    drain_timeout_s: float
    metrics_listen: str | None = None  # None: no listener for scrapes
    credentials: Credentials | None = None  # for the schedulers; None: those of the variables
    peer_tls: PeerTls | None = None  # of this port, and for those of other workers; None: nothing is encrypted


async def serve(options: ServiceOptions, load: Callable[[], LoadedModel]) -> None:
    """Serves until told to end. `load` is called on the execution thread, which may outlive this call.

    Raises ListenError, and the errors of `load`.
    """
    end = stop_event(options.parent_pipe_fd)
    tls = options.peer_tls
    server = GrpcServer([SERVICE_NAME], CLUSTER_MESSAGE_BYTES, credentials=None if tls is None else tls.of_server)
    bound = server.bind(options.listen)
    worker_id = options.worker_id or f"{socket.gethostname()}:{bound.rpartition(':')[2]}"
    step_key = secrets.token_hex(16) if options.scheduler is not None else ""
    servicer = WorkerServicer(worker_id, uuid.uuid4().hex, step_key)
    add_to_server(servicer, server.grpc)
    server.set_serving(REGISTERED, False)
    await server.start()
    log.info("listening", address=bound, worker_id=worker_id)
    figures = WorkerFigures()
    if options.metrics_listen is not None:
        log.info("metrics", address=listen_for_scrapes(options.metrics_listen, figures.read))
    thread = TaskThread("execution")
    thread.submit(restore_slice)  # it and the threads that it starts compute, and mostly do not wait
    try:
        engine = await before(thread.call(load), end.wait())
        if engine is None:
            return
        gc.collect()
        gc.freeze()  # loaded objects stay until the end: a full collection, 0.1 s, need not visit them
        executor = StepExecutor(engine.runner, thread, _exit_at_once, figures.record_step)
        copies = TaskThread("block copies")
        figures.description = engine.description
        if isinstance(engine.runner, PassCountingRunner):
            figures.passes = engine.runner
        servicer.serve(LoadedWorker(engine.description, executor, _served_blocks(engine, executor, copies, tls)))
        _set_serving(server, True)
        _log_ready(engine)
        identity = WorkerIdentity(
            worker_id=worker_id,
            incarnation=servicer.incarnation,
            address=advertised_address(bound, options.advertise),
            model_fingerprint=engine.description.model.fingerprint,
            step_key=step_key,
        )
        registration = None
        if options.scheduler is None:
            server.set_serving(REGISTERED, True)  # nobody is to take it
        else:

            def begin_life() -> WorkerIdentity:
                life = replace(identity, incarnation=uuid.uuid4().hex, step_key=secrets.token_hex(16))
                servicer.begin_life(life.incarnation, life.step_key)
                return life

            def tell_accepted(is_accepted: bool) -> None:
                server.set_serving(REGISTERED, is_accepted and not end.is_set())

            registration = Registration(
                options.scheduler,
                identity,
                executor.follow_epoch,
                credentials=options.credentials,
                begin_life=begin_life,
                on_accepted=tell_accepted,
                has_stream=lambda: servicer.has_stream,
            )
            servicer.on_stream_begin = lambda: tell_accepted(True)
            servicer.on_current_stream_end = registration.register_now
        await _until_end(end, server, registration, options.drain_timeout_s)
        try:
            async with asyncio.timeout(_LAST_STEPS_S):
                await servicer.drain()
                await executor.close()
                await copies.close()
                engine.close()
                await thread.close()
        except TimeoutError:
            log.warning("steps left unfinished: they did not end in time", waited_s=_LAST_STEPS_S)
    finally:
        await server.stop(_STOP_GRACE_S)
        log.info("worker ended")


def _served_blocks(
    engine: LoadedModel, executor: StepExecutor, copies: TaskThread, tls: PeerTls | None
) -> ServedBlocks | None:
    """The ways of blocks, for a worker whose blocks travel; `copies` is the thread that copies them."""
    travel = engine.travel
    if travel is None:
        return None
    executor.progress.on_epoch = travel.fetched.follow_epoch
    return ServedBlocks(
        reads=BlockReads(travel, executor.progress, copies),
        fetches=FetchCalls(travel, executor.progress, copies, GrpcBlockSource(tls)),
        format=travel.format,
        fetched=travel.fetched,
    )


async def _until_end(
    end: asyncio.Event, server: GrpcServer, registration: Registration | None, drain_timeout_s: float
) -> None:
    """Keeps the lease until told to end, then announces the end and waits for running sequences to move elsewhere.

    Raises what the registration fails with: a worker that registers no more is to be started again.
    """
    if registration is None:
        await end.wait()
        _set_serving(server, False)
        server.set_serving(REGISTERED, False)
        return
    keeping = asyncio.create_task(registration.keep_lease())
    await unless_failed(end.wait(), [keeping])
    _set_serving(server, False)
    server.set_serving(REGISTERED, False)
    await registration.leave_scheduler(drain_timeout_s)
    keeping.cancel()
    await registration.close()


def _exit_at_once() -> None:
    """Ends the process without waiting: calls to a lost device never return. The parent process restarts the worker."""
    os._exit(1)


def _set_serving(server: GrpcServer, serving: bool) -> None:
    for service in ("", SERVICE_NAME):
        server.set_serving(service, serving)


def _log_ready(engine: LoadedModel) -> None:
    description = engine.description
    log.info(
        "ready",
        model=description.model.name,
        device=description.device,
        dtype=description.model.dtype,
        weight_dtype=description.weight_dtype,
        kv_dtype=description.kv_dtype,
        **({"kernels": description.kernels, "packing": description.packing} if description.kernels else {}),
        **({"tensor_parallel": description.num_ranks} if description.num_ranks > 1 else {}),
        num_blocks=description.limits.num_blocks,
        num_host_blocks=description.limits.num_host_blocks,
        block_size=description.limits.block_size,
        bytes_per_block=description.bytes_per_block,
        max_model_len=description.limits.max_model_len,
        **_memory_fields(description),
        startup_ms={each.phase: round(each.duration_ms, 1) for each in description.startup},
    )


def _memory_fields(description: WorkerDescription) -> dict[str, object]:
    """Memory of weights, pool and steps, and the number of sequences of the greatest length that the pool holds."""
    memory, limits = description.memory, description.limits
    if memory is None:
        return {}
    known: dict[str, object] = {"dtype_reason": description.dtype_reason, **asdict(memory)}
    if description.num_threads is not None:
        known["threads"] = description.num_threads
    pool_tokens = limits.num_blocks * limits.block_size
    return {**known, "pool_tokens": pool_tokens, "num_longest": pool_tokens // limits.max_model_len}
