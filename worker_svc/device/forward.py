"""The forward pass on an accelerator: the decoder's weights, with as few launches between the products as can be.

It computes what `Decoder.hidden` and `Decoder.logits` do. Nothing in it waits for the device or depends on what the
device holds, so it can be captured in a graph. It knows no slots and no steps.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.shape import ScoreRule
from kernels.layers.layer_ops import Activation, Rotary
from kernels.layers.step_inputs_reference import StepInputs
from worker_svc.device.attention_plans import BatchAttention, Window
from worker_svc.device.operations import Operations
from worker_svc.kv_pool import KVPool
from worker_svc.model.decoder import Decoder
from worker_svc.model.layers import Attention, Mlp, Norm

# As the kernels name what `worker_svc.model.layers.ACTIVATIONS` has.
_GATED_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


class ForwardState(NamedTuple):
    """What the head starts from."""

    hidden: Tensor  # [T, hidden_size]: what the last layer gave
    residual: Tensor | None  # [T, hidden_size]: the sum of all before it, still to be added


class DeviceForward:
    """A decoder's weights and the pool that it writes, on one device."""

    def __init__(self, decoder: Decoder, kv_pool: KVPool, operations: Operations) -> None:
        config = decoder.config
        self._decoder = decoder
        self._kv_pool = kv_pool
        self._operations = operations
        self._rule = ScoreRule(config.attention_scale)
        self._gated_activation = _GATED_ACTIVATIONS[config.activation]
        self._angles = _angle_table(decoder)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, attention: BatchAttention) -> ForwardState:
        """Compute the tokens, and write their keys and values into the pool.

        Whatever must be in the pool before (earlier tokens, blocks copied or swapped in) must be queued already.
        """
        raise NotImplementedError

    @torch.inference_mode()
    def logits(self, state: ForwardState, logit_rows: Tensor | None) -> Tensor:
        """Logits [L, vocab_size] of the tokens `logit_rows` [L], in the model's dtype.

        With None, of all tokens, and then the state is used up.
        """
        raise NotImplementedError


def _angle_table(decoder: Decoder) -> Tensor | None:
    """cos and sin of all positions' rotary angles, [2, max_model_len, head_dim / 2] float32.

    At most 64 MiB for 131,072 positions: less than the launches that each step would have to make instead are worth.
    """
    frequencies = decoder.inverse_frequencies
    if frequencies is None:
        return None
    positions = torch.arange(decoder.config.max_model_len, dtype=torch.float32, device=decoder.device)
    angles = positions.unsqueeze(1) * frequencies
    return torch.stack((angles.cos(), angles.sin()))
