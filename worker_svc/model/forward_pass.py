"""What a runner asks of a model: hidden states of an iteration's tokens, and logits of some of them."""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.batch import ForwardBatch
from worker_svc.model.config import ModelConfig

# Of each of `ForwardBatch.logit_rows`: the token of its greatest logit, and whether all of its logits are finite.
GreedyChoice = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]


class ForwardPass(Protocol):
    """A model on one device. What it returns may be overwritten by its next call of the same method."""

    @property
    def config(self) -> ModelConfig:
        """The shape of the model."""

    @property
    def device(self) -> torch.device:
        """Where batches are expected."""

    def hidden(self, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        """Compute the batch's tokens and write their keys and values; what the head needs of `batch.logit_rows`.

        Returns [L, hidden_size]. Whatever must be in the cache before (earlier tokens of the rows, blocks copied or
        swapped in) must be there already.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """The head: any rows of `hidden` to logits [..., vocab_size], in float32 or the model's dtype."""
