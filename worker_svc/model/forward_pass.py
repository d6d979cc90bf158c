"""Interface between a runner and its model: hidden states of an iteration's tokens, and logits of some of them."""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.batch import ForwardBatch
from worker_svc.model.config import ModelConfig

# For each of `ForwardBatch.logit_rows`: the token of the greatest logit, and True if all logits are finite.
GreedyChoice = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]


class ForwardPass(Protocol):
    """A model on one device. The next call of the same method may overwrite its result."""

    @property
    def config(self) -> ModelConfig:
        """The shape of the model."""

    @property
    def device(self) -> torch.device:
        """Device on which batches must be."""

    def hidden(self, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        """Compute the batch's tokens, write their keys and values, and return the head's input for `logit_rows`.

        Returns [L, hidden_size]. Earlier tokens of the rows, and blocks that are copied or swapped in, must be in the
        cache before.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the head to any rows of `hidden`: logits [..., vocab_size], in float32 or the model's dtype."""
