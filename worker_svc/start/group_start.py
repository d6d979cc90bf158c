"""Rank 0's side of the start of a tensor-parallel group: starts the ranks, has them load, chooses how they reduce."""

import socket
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.native.shared_ranks import RankMemory, RankReduction, SharedRanks, make_memory
from quire import machine
from quire.worker_settings import WorkerSettings
from worker_svc.model.config import ModelConfig
from worker_svc.ranks.gloo_ranks import GlooRanks
from worker_svc.ranks.rank_connection import RankConnection
from worker_svc.ranks.rank_group import RankGroup, RankSetUp
from worker_svc.ranks.rank_starting import StartRank, accept_ranks, start_ranks
from worker_svc.ranks.rank_store import RankStore
from worker_svc.runner_choice import RunnerChoice, device_kind, device_of_rank
from worker_svc.start.device_ranks import connect_devices
from worker_svc.start.runner_start import Lead


class ReductionChoice(NamedTuple):
    """Facts that decide how ranks reduce."""

    config: ModelConfig
    dtype: torch.dtype
    has_native: bool


class StartingGroup:
    """The ranks from their start until their weights are loaded."""

    def __init__(self, settings: WorkerSettings, runner: RunnerChoice, start_rank: StartRank) -> None:
        """Start ranks here, or wait for those of other machines. Raises OptionError if they cannot be waited for."""
        self._settings = settings
        self._runner = runner
        size = settings.tensor_parallel
        self.num_on_machine = size if settings.group_address is None else 1
        self._connections: Sequence[RankConnection]
        if settings.group_address is None:
            self._connections = start_ranks(size, start_rank)
        else:
            self._connections = accept_ranks(settings.group_address, size)
        self.group = RankGroup(self._connections, settings.rank_timeout_s)
        self._store: RankStore | None = None
        self._reduction: RankReduction | None = None

    def set_up(self, fingerprint: str, choice: ReductionChoice, *, model: str) -> None:
        """Have all ranks load what rank 0 loads now. Raises RankLostError."""
        size, timeout_s = self.group.size, self._settings.rank_timeout_s
        memory = self._shared_memory(choice)
        if memory is None:
            host = "127.0.0.1" if self.num_on_machine > 1 else socket.gethostname()
            self._store = RankStore(host, 0, size, is_master=True)
        dtype = str(choice.dtype).removeprefix("torch.")
        settings = self._settings.model_copy(
            update={"model": model, "dtype": dtype, "rank": None, "runner": self._runner.kind}
        )
        ranks = [
            RankSetUp(
                rank=rank,
                size=size,
                num_on_machine=self.num_on_machine,
                settings=settings.model_copy(
                    update={"group_address": None, "device": self._device_of(rank), "worker_number": 0}
                ).model_dump(mode="json"),
                fingerprint=fingerprint,
                native=choice.has_native,
                slot_bytes=None if memory is None else memory.slot_bytes,
                store_port=None if self._store is None else self._store.port,
                timeout_s=timeout_s,
            )
            for rank in range(1, size)
        ]
        self.group.set_up(ranks, memory)
        if memory is not None:
            self._reduction = SharedRanks(memory, 0, size, timeout_s=timeout_s, num_cores=machine.num_processors())

    def lead(self) -> Lead:
        """The group, once all ranks have loaded their weights. Raises CheckpointError, OptionError or RankLostError."""
        weight_bytes = self.group.await_loaded(device_kind(self._runner.device))
        reduction = self._reduction or self._connect()
        return Lead(self.group, reduction, weight_bytes, self.num_on_machine)

    def _connect(self) -> RankReduction:
        """Connect ranks that share no memory, once all have loaded: before, they take their time, or may be refused."""
        assert self._store is not None, "ranks that share no memory have a store"
        size, timeout_s = self.group.size, self._settings.rank_timeout_s
        if self._is_on_cuda:
            return connect_devices(self._store, 0, size, self._runner.device, timeout_s)
        return GlooRanks(self._store, 0, size, timeout_s=timeout_s, on_one_machine=self.num_on_machine > 1)

    def _device_of(self, rank: int) -> str:
        """Device of a rank on this machine; of one elsewhere, which has its own, the type."""
        device = self._runner.device
        return device_of_rank(device, rank) if self.num_on_machine > 1 else device.type

    @property
    def _is_on_cuda(self) -> bool:
        return self._runner.device.type == "cuda"

    def _shared_memory(self, choice: ReductionChoice) -> RankMemory | None:
        """Memory for the widest rows that ranks exchange; None if they reduce by Gloo or NCCL."""
        if not choice.has_native or self.num_on_machine == 1 or self._is_on_cuda:
            return None
        config = choice.config
        columns = max(config.hidden_size, config.embed_dim, config.query_size, -(-config.vocab_size // self.group.size))
        return make_memory(self.group.size, columns * choice.dtype.itemsize)


def settings_of_rank(settings: WorkerSettings, num_threads: int) -> WorkerSettings:
    """Settings of one rank: its part of the worker's threads and memory."""
    size = settings.tensor_parallel
    changed: dict[str, int] = {}
    if settings.kv_memory_bytes is not None:
        changed["kv_memory_bytes"] = max(1, settings.kv_memory_bytes // size)
    if settings.group_address is None:  # else each has a machine, or a container, for itself
        changed["threads"] = max(1, num_threads // size)
        if settings.memory_bytes is not None:
            changed["memory_bytes"] = max(1, settings.memory_bytes // size)
    return settings.model_copy(update=changed)
