"""The forward pass on an accelerator: the decoder's weights, with as few launches between the products as possible.

It neither waits for the device nor depends on values on the
device, so it can be captured in a graph. Knows no seats and no steps.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention.shape import ScoreRule
from kernels.layers.layer_ops import Rotary, activate
from kernels.layers.step_inputs_reference import StepInputs
from kernels.native.shared_ranks import RankReduction
from worker_svc.gpu.attention_plans import BatchAttention, LayerKeys
from worker_svc.gpu.divided_pass import DividedPass
from worker_svc.gpu.quantised_products import with_operations
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.config import NormPlace
from worker_svc.model.decoder import Decoder
from worker_svc.model.layers import Attention, Mlp, Norm
from worker_svc.operations import Operations


class DeviceForward:
    """A decoder's weights and the pool that it writes, on one device."""

    def __init__(
        self,
        decoder: Decoder,
        kv_pool: KVPool,
        operations: Operations,
        ranks: RankReduction | None = None,
        *,
        num_positions: int | None = None,
    ) -> None:
        """Takes the memory of the rotary table, as far as positions are computed: all of the model's by default.

        `ranks`: the group among which the decoder is divided; all its ranks compute the same passes.
        """
        config = decoder.config
        self._divided = DividedPass(decoder, ranks)
        self._decoder = with_operations(decoder, operations)
        self._kv_pool = kv_pool
        self._operations = operations
        self.rule = ScoreRule(config.attention_scale)
        self._activation = config.activation
        # At most 64 MiB for 131,072 positions, which saves launches in each step. [2, num_positions, head_dim / 2]
        self._angles: Tensor | None = None
        if decoder.inverse_frequencies is not None:
            size = (2, num_positions or config.max_model_len, len(decoder.inverse_frequencies))
            self._angles = torch.empty(size, device=decoder.device)
            decoder.write_rotary(*self._angles)

    @property
    def vocab_size(self) -> int:
        return self._decoder.config.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of logits and of the whole computation."""
        return self._decoder.dtype

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, attention: BatchAttention) -> Tensor:
        """Compute the tokens, and write their keys and values into the pool.

        Returns the hidden states [T, hidden_size], normalised for the head, in memory of their own.

        Writes of earlier tokens, copies and swap-ins must be queued before, and the plans of the decode tokens filled.
        """
        rotary = self._rotary(inputs.positions)
        state = _LayerState(self._embed(inputs), None)
        attended = self._attended(len(inputs.positions))
        for index, layer in enumerate(self._decoder.layers):
            tokens = _LayerTokens(index, rotary, inputs.slot_mapping, attention, attended)
            if layer.norm_place is NormPlace.BEFORE:
                hidden, residual = self._add_and_norm(layer.attention_norm, state)
                state = _LayerState(self._attend(layer.attention, hidden, tokens), residual)
                hidden, residual = self._add_and_norm(layer.mlp_norm, state)
                state = _LayerState(self._mlp(layer.mlp, hidden), residual)
            elif layer.norm_place is NormPlace.ON_OUTPUT:
                hidden = self._attend(layer.attention, state.hidden, tokens)
                hidden = state.hidden + self._norm(layer.attention_norm, hidden, None)
                state = _LayerState(hidden + self._norm(layer.mlp_norm, self._mlp(layer.mlp, hidden), None), None)
            else:
                hidden = self._attend(layer.attention, state.hidden, tokens)
                hidden = self._norm(layer.attention_norm, hidden, state.hidden)
                state = _LayerState(self._norm(layer.mlp_norm, self._mlp(layer.mlp, hidden), hidden), None)
        return self._final(state)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, logit_rows: Tensor | None) -> Tensor:
        """Logits [L, vocab_size] of the tokens `logit_rows` [L], in the model's dtype; with None, of all tokens.

        hidden: [T, hidden_size], as `forward` returns them
        """
        decoder = self._decoder
        if logit_rows is not None:
            hidden = hidden.index_select(0, logit_rows)
        if decoder.project_out is not None:
            hidden = decoder.project_out(hidden)
        return self._divided.logits(decoder.head(hidden))

    def _final(self, state: "_LayerState") -> Tensor:
        norm, (hidden, residual) = self._decoder.final_norm, state
        if norm is not None:
            return self._norm(norm, hidden, residual)
        return hidden if residual is None else hidden + residual

    def _embed(self, inputs: StepInputs) -> Tensor:
        decoder, config = self._decoder, self._decoder.config
        hidden = self._divided.look_up(decoder.token_embedding, inputs.token_ids, config.vocab_size)
        if decoder.project_in is not None:
            hidden = decoder.project_in(hidden)
        if decoder.position_embedding is not None:
            places, total = inputs.positions + config.position_offset, config.position_offset + config.max_model_len
            hidden += self._divided.look_up(decoder.position_embedding, places, total)
        return self._divided.summed(hidden)

    def _rotary(self, positions: Tensor) -> Rotary | None:
        if self._angles is None:
            return None
        cos, sin = self._angles.index_select(1, positions).unbind(0)
        return Rotary(cos, sin)

    def _attended(self, num_tokens: int) -> Tensor:
        """Memory for the output of attention in every layer; padding, which attention leaves out, is zero in all."""
        config = self._decoder.config
        size = (num_tokens, config.num_heads, config.head_dim)
        return torch.zeros(size, dtype=self.dtype, device=self._decoder.device)

    def _attend(self, attention: Attention, x: Tensor, tokens: "_LayerTokens") -> Tensor:
        """One product, one launch that rotates and writes, and attention of all rows into one output."""
        num_tokens = len(x)
        key_cache, value_cache = self._kv_pool.key_cache(tokens.layer), self._kv_pool.value_cache(tokens.layer)
        window = self._decoder.config.sliding_windows[tokens.layer]
        heads = attention.qkv(x).view(num_tokens, -1, attention.head_dim)
        num_kv_heads = attention.num_kv_heads
        query, key, value = torch.split(heads, [attention.num_heads, num_kv_heads, num_kv_heads], dim=1)
        if attention.q_norm is not None and attention.k_norm is not None:
            query, key = self._norm_heads(attention.q_norm, query), self._norm_heads(attention.k_norm, key)
        self._operations.rotate_and_write(query, key, value, tokens.rotary, key_cache, value_cache, tokens.slot_mapping)
        out = tokens.attended
        tokens.attention.attend(self._operations, self.rule, LayerKeys(key_cache, value_cache, window), query, out)
        return self._divided.summed(attention.out(out.view(num_tokens, -1)))

    def _norm_heads(self, norm: Norm, heads: Tensor) -> Tensor:
        """Norm of each head, or of all heads of a token as one vector, as its size says. heads: [T, heads, head_dim]"""
        if norm.size == heads.shape[-1]:
            return self._norm(norm, heads, None)
        every = self._divided.norm_of_all(lambda rows: self._norm(norm, rows, None), heads.view(len(heads), -1))
        return every.view(heads.shape)

    def _mlp(self, mlp: Mlp, x: Tensor) -> Tensor:
        activation = self._operations.gated_activation if mlp.gated else activate
        return self._divided.summed(mlp.down(activation(mlp.up(x), self._activation)))

    def _add_and_norm(self, norm: Norm, state: "_LayerState") -> tuple[Tensor, Tensor]:
        """The normalised sum of a state, and the sum itself, which becomes the residual."""
        if state.residual is None:
            return self._norm(norm, state.hidden, None), state.hidden
        return self._norm(norm, state.hidden, state.residual), state.residual

    def _norm(self, norm: Norm, x: Tensor, residual: Tensor | None) -> Tensor:
        """Normalise x, or the residual after adding x to it in place."""
        if norm.rms:
            return self._operations.rms_norm(x, norm.weight, norm.eps, residual)
        return self._operations.layer_norm(x, norm.weight, norm.bias, norm.eps, residual)


class _LayerState(NamedTuple):
    """Input of a layer."""

    hidden: Tensor  # [T, hidden_size]: output of the layer before
    residual: Tensor | None  # [T, hidden_size]: the sum of all earlier outputs, still to be added


class _LayerTokens(NamedTuple):
    """Input of a layer other than hidden states."""

    layer: int
    rotary: Rotary | None
    slot_mapping: Tensor
    attention: BatchAttention
    attended: Tensor  # [T, num_heads, head_dim]
