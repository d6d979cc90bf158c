"""Rank 0's model and KV pool: they tell the other ranks each pass and each move of blocks, and then do their own part.

A pass that breaks off leaves the ranks at different places, so it ends the group.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.native.shared_ranks import RankReduction
from kernels.sampling.sampling_operations import SamplingOperations
from worker_svc.cpu.host_decoder import GreedyChoice, HostDecoder
from worker_svc.memory.kv_pool import BlockShape, KVPool
from worker_svc.model.batch import ForwardBatch
from worker_svc.model.config import ModelConfig
from worker_svc.ranks.rank_connection import FrameKind
from worker_svc.ranks.rank_group import RankGroup
from worker_svc.ranks.whole_pass import whole_or_lost


class LeadDecoder:
    """A model of which rank 0 computes its part. A `PassModel`."""

    def __init__(self, model: HostDecoder, group: RankGroup, reduction: RankReduction) -> None:
        self.group = group
        self.reduction = reduction
        self._model = model
        self._first_row = 0  # of the hidden states of the last pass, in their storage
        self._stride = 1

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def sampling(self) -> SamplingOperations:
        """See HostDecoder.sampling."""
        return self._model.sampling

    @property
    def before_pass(self) -> Callable[[], None]:
        """See HostDecoder."""
        return self._model.before_pass

    @before_pass.setter
    def before_pass(self, announce: Callable[[], None]) -> None:
        self._model.before_pass = announce

    def hidden(self, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        """See HostDecoder.hidden."""
        self.group.begin_pass(batch, with_logits=False)
        with whole_or_lost(self.reduction):
            hidden = self._model.hidden(batch, kv_pool)
        self._first_row, self._stride = int(hidden.storage_offset()), max(1, hidden.stride(0))
        return hidden

    def greedy(self, batch: ForwardBatch, kv_pool: KVPool) -> GreedyChoice:
        """See HostDecoder.greedy."""
        self.group.begin_pass(batch, with_logits=True)
        with whole_or_lost(self.reduction):
            return self._model.greedy(batch, kv_pool)

    def logits(self, hidden: Tensor) -> Tensor:
        """See HostDecoder.logits. hidden: rows, one after the other, of the last result of `hidden`."""
        begin = (int(hidden.storage_offset()) - self._first_row) // self._stride
        self.group.begin_logits(begin, begin + len(hidden))
        with whole_or_lost(self.reduction):
            return self._model.logits(hidden)


class LeadPool(KVPool):
    """Rank 0's part of each block."""

    def __init__(
        self, shape: BlockShape, num_blocks: int, device: torch.device, num_host_blocks: int, group: RankGroup
    ) -> None:
        super().__init__(shape, num_blocks, device, num_host_blocks)
        self._group = group

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See KVPool.copy_blocks."""
        self._tell(FrameKind.COPY, pairs)
        super().copy_blocks(pairs)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See KVPool.swap_out."""
        self._tell(FrameKind.SWAP_OUT, pairs)
        super().swap_out(pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See KVPool.swap_in."""
        self._tell(FrameKind.SWAP_IN, pairs)
        super().swap_in(pairs)

    def _tell(self, kind: FrameKind, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            self._group.move_blocks(kind, pairs)
