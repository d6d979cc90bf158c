"""Loads a rank other than 0: its part of the weights, its part of each KV block, and the reductions of its group.

Everything that must be the same on all ranks comes from rank 0.
"""

from threading import Thread

import torch

from kernels.native.shared_ranks import RankMemory, RankReduction, SharedRanks
from quire.worker_settings import WorkerSettings
from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.checkpoint.model_folder import fingerprint, resolve_checkpoint
from worker_svc.cpu.host_decoder import HostDecoder
from worker_svc.cpu.start import choose_host
from worker_svc.memory.huge_pages import collapse_memory
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.decoder import load_decoder, named_dtype
from worker_svc.model.model_part import ModelPart
from worker_svc.option_check import OptionError
from worker_svc.ranks.follower import Follower
from worker_svc.ranks.gloo_ranks import GlooRanks, GlooStore
from worker_svc.ranks.rank_connection import FrameKind, RankConnection
from worker_svc.ranks.rank_group import RankSetUp
from worker_svc.runner_choice import RequestedRunner, choose_runner, detect_machine
from worker_svc.start.runner_start import batched_tokens, plan_cpu_pool, take_memory_in_background


def load_follower(connection: RankConnection, own: WorkerSettings | None) -> Follower:
    """Load as rank 0 says; it hears why, if this rank cannot.

    `own`: settings of a rank on another machine; of those the model's folder and the threads count.
    Raises RankLostError if rank 0 ends; SystemExit if the model cannot be loaded here.
    """
    set_up = RankSetUp(**connection.receive_json(FrameKind.SET_UP))
    try:
        return _load(connection, set_up, own)
    except (CheckpointError, OptionError) as error:
        connection.send_json(FrameKind.REFUSED, reason=str(error))
        raise SystemExit(f"rank {set_up.rank}: {error}") from error


def _load(connection: RankConnection, set_up: RankSetUp, own: WorkerSettings | None) -> Follower:
    settings = WorkerSettings(**set_up.settings)
    if own is not None:
        settings = settings.model_copy(update={"model": own.model, "threads": own.threads})
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    folder = resolve_checkpoint(settings.model)
    if fingerprint(folder) != set_up.fingerprint:
        raise CheckpointError(f"{folder} is not the model of rank 0: give all ranks of a group the same model")
    dtype = named_dtype(settings.dtype)
    choice = choose_runner(
        RequestedRunner(device="cpu", runner="cpu", kv_dtype=settings.kv_dtype),
        detect_machine(),
    )
    kernels = "native" if set_up.native else "torch"
    is_int8 = settings.weight_dtype == "int8"
    host = choose_host(kernels, dtype, int8_weights=is_int8, int8_kv=choice.kv_dtype == torch.int8)
    reduction = _reduction(connection, set_up)
    decoder = load_decoder(
        folder, dtype, choice.device, host.packing.make_product, model_part=ModelPart(set_up.rank, set_up.size)
    )
    connection.send_json(FrameKind.LOADED, weight_bytes=decoder.weight_bytes)
    connection.receive_json(FrameKind.PLAN)
    shape = decoder.block_shape(settings.block_size, choice.kv_dtype)
    plan = plan_cpu_pool(settings, decoder, shape, set_up.num_on_machine)
    connection.send_json(FrameKind.PLANNED, num_blocks=plan.num_blocks)
    num_blocks = int(connection.receive_json(FrameKind.POOL)["num_blocks"])
    pool = KVPool(shape, num_blocks, decoder.device, settings.num_host_blocks)
    model = HostDecoder(decoder, host.kernels, reduction)
    model.reserve(batched_tokens(settings, decoder.device))
    return Follower(model, pool, reduction, after_first_pass=lambda: _settle_memory(model, pool))


def _settle_memory(model: HostDecoder, pool: KVPool) -> None:
    """Do what rank 0 does at its start, beside the passes that follow."""
    take_memory_in_background(model, pool)
    Thread(target=collapse_memory, name="huge-pages", daemon=True).start()


def _reduction(connection: RankConnection, set_up: RankSetUp) -> RankReduction:
    if set_up.slot_bytes is not None:
        memory = RankMemory(connection.receive_fd(), set_up.slot_bytes)
        return SharedRanks(memory, set_up.rank, set_up.size, timeout_s=set_up.timeout_s)
    assert set_up.store_port is not None, "ranks reduce by shared memory or by Gloo"
    store = GlooStore(connection.peer_host, set_up.store_port, set_up.size, is_master=False)
    return GlooRanks(
        store, set_up.rank, set_up.size, timeout_s=set_up.timeout_s, on_one_machine=set_up.num_on_machine > 1
    )
