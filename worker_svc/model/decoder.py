"""The decoder: one iteration's tokens in, logits of the wanted rows out.

It owns the weights, and reads and writes the given KV pool at the places that the batch names. It does not know the
sequences behind the rows, and it samples nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.attention.paged_attention import AttentionPlan, paged_attention, plan_attention
from kernels.blocks.kv_blocks import write_kv
from worker_svc.checkpoint.dtype_choice import saved_dtype
from worker_svc.checkpoint.weight_files import read_headers
from worker_svc.checkpoint.weight_reader import WeightReader
from worker_svc.memory.kv_pool import BlockShape, KVPool
from worker_svc.model.batch import ForwardBatch
from worker_svc.model.config import ModelConfig
from worker_svc.model.families import read_model_config
from worker_svc.model.layers import (
    DecoderLayer,
    Linear,
    MakeProduct,
    Norm,
    Product,
    Rotation,
    inverse_frequencies,
    rotation,
)
from worker_svc.model.weights import WeightLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Weights of one model, in one dtype on one device."""

    config: ModelConfig
    token_embedding: Tensor  # [vocab_size, embed_dim]
    position_embedding: Tensor | None  # [position_offset + max_model_len, hidden_size]
    project_in: Product | None
    project_out: Product | None
    layers: tuple[DecoderLayer, ...]
    final_norm: Norm | None
    head: Product
    inverse_frequencies: Tensor | None  # [head_dim / 2] float32
    num_parameters: int  # a tied head counts once
    num_parameters_kept: int  # in memory: a head that is packed beside the embedding counts twice

    @property
    def dtype(self) -> torch.dtype:
        return self.token_embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.token_embedding.device

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take on the device."""
        return self.num_parameters_kept * self.dtype.itemsize

    def block_shape(self, block_size: int, kv_dtype: torch.dtype | None = None) -> BlockShape:
        """The shape of a block that holds this model's keys and values, in its dtype unless another is given."""
        return BlockShape(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            block_size=block_size,
            dtype=kv_dtype or self.dtype,
        )

    def forward(self, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        """Compute the batch's tokens, write their keys and values, return logits [L, vocab_size] in float32.

        Only the rows in `batch.logit_rows` go through the head. Earlier tokens of the rows, and blocks that are copied
        or swapped in, must be in the cache before.
        """
        return self.logits(self.hidden(batch, kv_pool))

    def hidden(self, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        """Compute `forward` up to the head: [L, hidden_size], for callers that compute logits in slices."""
        assert kv_pool.shape.dtype == self.dtype, "keys and values of another dtype are for the device runner alone"
        with torch.inference_mode():
            hidden = self._embed(batch)
            rotate = self._rotation(batch.positions)
            plans = self._plan(batch, kv_pool)
            for index, layer in enumerate(self.layers):
                window = self.config.sliding_windows[index]
                cache = _LayerCache(kv_pool, index, batch.slot_mapping, plans[window], self.config.attention_scale)
                hidden = layer(hidden, rotate, cache.attend)
            return hidden[batch.logit_rows]

    def _embed(self, batch: ForwardBatch) -> Tensor:
        hidden = self.token_embedding[batch.token_ids]
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        if self.position_embedding is not None:
            hidden = hidden + self.position_embedding[batch.positions + self.config.position_offset]
        return hidden

    def _rotation(self, positions: Tensor) -> Rotation | None:
        if self.inverse_frequencies is None:
            return None
        return rotation(positions, self.inverse_frequencies, self.dtype)

    def _plan(self, batch: ForwardBatch, kv_pool: KVPool) -> dict[int | None, AttentionPlan]:
        """One plan for all layers with the same window."""
        any_layer = kv_pool.key_cache(0)
        windows = set(self.config.sliding_windows)
        return {window: plan_attention(batch.rows, any_layer, window) for window in windows}

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the head to any rows of `hidden`: logits [..., vocab_size] in float32."""
        with torch.inference_mode():
            if self.final_norm is not None:
                hidden = self.final_norm(hidden)
            if self.project_out is not None:
                hidden = self.project_out(hidden)
            return self.head(hidden).float()


@dataclass(frozen=True, slots=True)
class _LayerCache:
    """One layer's part of the pool during one iteration: new keys and values go in, then queries attend."""

    kv_pool: KVPool
    layer: int
    slot_mapping: Tensor
    plan: AttentionPlan
    scale: float

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key_cache, value_cache = self.kv_pool.key_cache(self.layer), self.kv_pool.value_cache(self.layer)
        write_kv(key, value, key_cache, value_cache, self.slot_mapping)
        return paged_attention(query, key_cache, value_cache, self.plan, self.scale)


def load_decoder(
    path: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    make_product: MakeProduct = Linear,
    on_part: Callable[[float], None] | None = None,
) -> Decoder:
    """Load a checkpoint's folder onto a device, in `dtype` or, with None, in the saved dtype.

    `make_product` gets each matrix as it is read, and may keep it in a form of its own. `on_part` is called with the
    fraction of the layers that has been read, from 0 to 1.

    Raises CheckpointError, which says what to do, if the checkpoint cannot be served.
    """
    config = read_model_config(path)
    dtype = dtype or named_dtype(saved_dtype(config.dtype, read_headers(path)))
    with WeightReader(path) as reader:
        return make_decoder(reader, config, dtype, device, make_product, on_part)


def make_decoder(
    reader: WeightReader,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    make_product: MakeProduct = Linear,
    on_part: Callable[[float], None] | None = None,
) -> Decoder:
    """A decoder of this shape with the reader's weights."""
    loader = WeightLoader(reader, config, dtype, device, make_product)
    token_embedding = loader.token_embedding()
    project_in, project_out = loader.projections()
    rope = config.rope
    layers = []
    for index in range(config.num_layers):
        layers.append(loader.layer(index))
        if on_part is not None:
            on_part((index + 1) / config.num_layers)
    return Decoder(
        config=config,
        token_embedding=token_embedding,
        position_embedding=loader.position_embedding(),
        project_in=project_in,
        project_out=project_out,
        layers=tuple(layers),
        final_norm=loader.final_norm(),
        head=loader.head(token_embedding),
        inverse_frequencies=None if rope is None else inverse_frequencies(rope, config.head_dim, device),
        num_parameters=loader.num_parameters_read,
        num_parameters_kept=loader.num_parameters_kept,
    )


def named_dtype(name: str) -> torch.dtype:
    """The dtype with this name in torch."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), "settings, config.json and files name dtypes only"
    return dtype
