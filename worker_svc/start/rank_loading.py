"""Loads a rank other than 0: its part of the weights, its part of each KV block, and the reductions of its group.

Everything that must be the same on all ranks comes from rank 0.
"""

from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import torch

from kernels.native.shared_ranks import RankMemory, RankReduction, SharedRanks
from quire import machine
from quire.worker_settings import WorkerSettings
from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.checkpoint.model_folder import fingerprint, resolve_checkpoint
from worker_svc.checkpoint.tokenizer_files import read_tokenizer_files
from worker_svc.cpu.host_decoder import HostDecoder
from worker_svc.cpu.start import choose_host
from worker_svc.description import PhaseClock
from worker_svc.gpu.start import refuse_large_weights
from worker_svc.memory.huge_pages import collapse_memory
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.decoder import Decoder, load_decoder, named_dtype
from worker_svc.model.families import read_model_config
from worker_svc.model.layers import MakeProduct
from worker_svc.model.model_part import ModelPart
from worker_svc.option_check import OptionError
from worker_svc.ranks.follower import Follower
from worker_svc.ranks.gloo_ranks import GlooRanks
from worker_svc.ranks.rank_connection import FrameKind, RankConnection
from worker_svc.ranks.rank_group import RankSetUp, other_device
from worker_svc.ranks.rank_place import RankPlace
from worker_svc.ranks.rank_store import RankStore
from worker_svc.ranks.step_follower import StepFollower
from worker_svc.runner_choice import RunnerChoice, choose_runner, detect_machine, device_kind
from worker_svc.start.device_ranks import connect_devices
from worker_svc.start.launcher_check import check_launcher
from worker_svc.start.pool_sizes import batched_tokens
from worker_svc.start.runner_start import host_decoder, plan_cpu_pool, start_device_runner, take_memory_in_background
from worker_svc.start.settled_choices import device_products, requested_runner, seat_grammars


def load_follower(connection: RankConnection, own: WorkerSettings | None) -> Follower | StepFollower:
    """Load as rank 0 says; it hears why, if this rank cannot.

    `own`: settings of a rank on another machine; of those the model's folder, the device and the threads count.
    Raises RankLostError if rank 0 ends; SystemExit if the model cannot be loaded here.
    """
    set_up = RankSetUp(**connection.receive_json(FrameKind.SET_UP))
    memory = None if set_up.slot_bytes is None else RankMemory(connection.receive_fd(), set_up.slot_bytes)
    try:
        return _load(_LoadingRank(connection, set_up, memory, _settings(set_up, own)))
    except (CheckpointError, OptionError) as error:
        connection.send_json(FrameKind.REFUSED, reason=str(error))
        raise SystemExit(f"rank {set_up.rank}: {error}") from error


@dataclass(frozen=True, slots=True)
class _LoadingRank:
    """A rank that loads what rank 0 loads at the same time."""

    connection: RankConnection
    set_up: RankSetUp
    memory: RankMemory | None  # by which ranks on one machine reduce
    settings: WorkerSettings

    @property
    def model_part(self) -> ModelPart:
        return ModelPart(self.set_up.rank, self.set_up.size)

    def load_decoder(self, folder: Path, choice: RunnerChoice, make_product: MakeProduct) -> Decoder:
        """Load this rank's part, and wait until all ranks have theirs."""
        dtype = named_dtype(self.settings.dtype)
        with refuse_large_weights(choice.device):
            decoder = load_decoder(folder, dtype, choice.device, make_product, model_part=self.model_part)
        kind = device_kind(choice.device)
        self.connection.send_json(FrameKind.LOADED, weight_bytes=decoder.weight_bytes, device=kind)
        self.connection.receive_json(FrameKind.PLAN)
        return decoder

    def agree_on_least(self, number: int) -> int:
        """See RankGroup.agree_on_least."""
        self.connection.send_json(FrameKind.OFFER, number=number)
        return int(self.connection.receive_json(FrameKind.LEAST)["number"])

    def reduction_on_cpus(self) -> RankReduction:
        """Connect to the other ranks, on CPUs."""
        set_up = self.set_up
        if self.memory is not None:
            num_cores = machine.num_processors()
            return SharedRanks(self.memory, set_up.rank, set_up.size, timeout_s=set_up.timeout_s, num_cores=num_cores)
        on_one_machine = set_up.num_on_machine > 1
        return GlooRanks(
            self.store(), set_up.rank, set_up.size, timeout_s=set_up.timeout_s, on_one_machine=on_one_machine
        )

    def store(self) -> RankStore:
        """The store by which ranks find each other."""
        assert self.set_up.store_port is not None, "ranks that share no memory have a store"
        return RankStore(self.connection.peer_host, self.set_up.store_port, self.set_up.size, is_master=False)


def _settings(set_up: RankSetUp, own: WorkerSettings | None) -> WorkerSettings:
    settings = WorkerSettings(**set_up.settings)
    if own is None:
        return settings
    changed = {"model": own.model, "threads": own.threads}
    if settings.device != "cpu":
        changed["device"] = "cuda" if own.device == "auto" else own.device
    return settings.model_copy(update=changed)


def _load(rank: _LoadingRank) -> Follower | StepFollower:
    settings, set_up = rank.settings, rank.set_up
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    folder = resolve_checkpoint(settings.model)
    if fingerprint(folder) != set_up.fingerprint:
        raise CheckpointError(
            f"{folder} is not the model of rank 0: give all ranks of a group the same model folder and version of Quire"
        )
    choice = choose_runner(requested_runner(settings.model_copy(update={"tensor_parallel": 1})), detect_machine())
    if choice.kind == "cpu":
        return _load_on_host(rank, folder, choice)
    check_launcher(choice)
    if choice.device.type != torch.device(set_up.settings["device"]).type:
        raise OptionError(other_device(set_up.rank, device_kind(choice.device), set_up.settings["device"]))
    return _load_on_device(rank, folder, choice)


def _load_on_host(rank: _LoadingRank, folder: Path, choice: RunnerChoice) -> Follower:
    settings = rank.settings
    kernels = "native" if rank.set_up.native else "torch"
    is_int8 = settings.weight_dtype == "int8"
    dtype = named_dtype(settings.dtype)
    host = choose_host(
        kernels,
        dtype,
        int8_weights=is_int8,
        int8_kv=choice.kv_dtype == torch.int8,
        head_dim=read_model_config(folder).head_dim,
    )
    decoder = rank.load_decoder(folder, choice, host.packing.make_product)
    reduction = rank.reduction_on_cpus()
    shape = decoder.block_shape(settings.block_size, choice.kv_dtype)
    model = host_decoder(settings, decoder, host.kernels, reduction)
    plan = plan_cpu_pool(settings, decoder, shape, rank.set_up.num_on_machine)
    num_blocks = rank.agree_on_least(plan.num_blocks)
    pool = KVPool(shape, num_blocks, decoder.device, settings.num_host_blocks)
    model.reserve(batched_tokens(settings, decoder.device))
    return Follower(model, pool, reduction, after_first_pass=lambda: _settle_memory(model, pool))


def _load_on_device(rank: _LoadingRank, folder: Path, choice: RunnerChoice) -> StepFollower:
    settings, set_up, on_cuda = rank.settings, rank.set_up, choice.device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(choice.device)  # for this thread, which launches all kernels
    decoder = rank.load_decoder(folder, choice, device_products(settings))
    reduction: RankReduction
    if on_cuda:
        reduction = connect_devices(rank.store(), set_up.rank, set_up.size, choice.device, set_up.timeout_s)
    else:
        reduction = rank.reduction_on_cpus()
    grammars = seat_grammars(read_tokenizer_files(folder), decoder.config, limits_time=False)
    place = RankPlace(reduction, rank.agree_on_least, set_up.num_on_machine, compiles=set_up.num_on_machine == 1)
    started = start_device_runner(settings, decoder, choice, PhaseClock(), grammars, _ignore_progress, place)
    return StepFollower(started.runner, reduction)


def _ignore_progress(part: float) -> None:
    """Rank 0 shows the progress of the start."""


def _settle_memory(model: HostDecoder, pool: KVPool) -> None:
    """Do what rank 0 does at its start, beside the passes that follow."""
    take_memory_in_background(model, pool)
    Thread(target=collapse_memory, name="huge-pages", daemon=True).start()
