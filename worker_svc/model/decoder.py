"""Weights of a decoder and their loading. `cpu.host_decoder` and `gpu.forward` compute with them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import structlog
import torch
from torch import Tensor

from worker_svc.checkpoint.dtype_choice import saved_dtype
from worker_svc.checkpoint.weight_files import read_headers
from worker_svc.checkpoint.weight_reader import WeightReader
from worker_svc.memory.kv_pool import BlockShape
from worker_svc.model.config import ModelConfig
from worker_svc.model.families import read_model_config
from worker_svc.model.layers import (
    DecoderLayer,
    Linear,
    MakeProduct,
    Norm,
    Product,
    inverse_frequencies,
)
from worker_svc.model.model_part import WHOLE, ModelPart, rank_config
from worker_svc.model.tensor_names import unused_tensors
from worker_svc.model.weights import WeightLoader

_ROTARY_PART = 8192  # positions whose angles are computed at once

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Weights of one model, or of a part of it, in one dtype on one device."""

    config: ModelConfig  # of a part: with the heads and the inner dimension of the part
    token_embedding: Tensor  # [vocab_size, embed_dim], or the part's rows
    position_embedding: Tensor | None  # [position_offset + max_model_len, hidden_size], or the part's rows
    project_in: Product | None
    project_out: Product | None
    layers: tuple[DecoderLayer, ...]
    final_norm: Norm | None
    head: Product
    inverse_frequencies: Tensor | None  # [head_dim / 2] float32
    num_parameters: int  # a tied head counts once
    weight_bytes: int  # memory on the device: a head that is packed beside the embedding counts beside it
    model_part: ModelPart = WHOLE

    @property
    def dtype(self) -> torch.dtype:
        return self.token_embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.token_embedding.device

    def with_layer_products(self, change: Callable[[Product], Product]) -> Self:
        """Apply `change` to each product of the layers; all else stays the same, in the same memory."""
        return replace(self, layers=tuple(layer.with_products(change) for layer in self.layers))

    def write_rotary(self, cosines: Tensor, sines: Tensor) -> None:
        """Write cosines and sines of the first positions' rotary angles, [positions, head_dim / 2] float32 each.

        Part by part, since tables of long contexts are large. For models with rotary embeddings.
        """
        assert self.inverse_frequencies is not None, "the model has rotary embeddings"
        for first in range(0, len(cosines), _ROTARY_PART):
            part = slice(first, min(first + _ROTARY_PART, len(cosines)))
            positions = torch.arange(part.start, part.stop, dtype=torch.float32, device=self.device)
            angles = positions.unsqueeze(1) * self.inverse_frequencies
            cosines[part] = angles.cos()
            sines[part] = angles.sin()

    def block_shape(self, block_size: int, kv_dtype: torch.dtype | None = None) -> BlockShape:
        """The shape of a block that holds this model's keys and values, in its dtype unless another is given."""
        return BlockShape(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            block_size=block_size,
            dtype=kv_dtype or self.dtype,
        )


def load_decoder(
    path: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    make_product: MakeProduct = Linear,
    on_part: Callable[[float], None] | None = None,
    model_part: ModelPart = WHOLE,
) -> Decoder:
    """Load a checkpoint's folder onto a device, in `dtype` or, with None, in the saved dtype.

    `make_product` gets each matrix as it is read, and may keep it in a form of its own. `on_part` is called with the
    fraction of the layers that has been read, from 0 to 1. Of a part only its part of each tensor is read.

    Raises CheckpointError, which says what to do, if the checkpoint cannot be served; OptionError if it cannot be
    divided.
    """
    config = read_model_config(path)
    dtype = dtype or named_dtype(saved_dtype(config.dtype, read_headers(path)))
    with WeightReader(path) as reader:
        if model_part.is_first:
            _warn_of_unused(config, reader)
        return make_decoder(reader, config, dtype, device, make_product, on_part, model_part)


def _warn_of_unused(config: ModelConfig, reader: WeightReader) -> None:
    """Warn of weights that are left out, as `transformers` does: they may belong to another config.json."""
    unused = unused_tensors(config, reader.names, reader.folder)
    if unused:
        shown = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
        log.warning(
            f"config.json has no place for {len(unused)} of the tensors, which are left out ({shown}): if the model "
            "was trained with them, it needs another config.json, such as one with attention_bias or more layers"
        )


def make_decoder(
    reader: WeightReader,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    make_product: MakeProduct = Linear,
    on_part: Callable[[float], None] | None = None,
    model_part: ModelPart = WHOLE,
) -> Decoder:
    """A decoder of this shape with the reader's weights, or a part of it."""
    config_of_part = rank_config(config, model_part.size)
    loader = WeightLoader(reader, config, dtype, device, make_product, model_part)
    token_embedding = loader.token_embedding()
    project_in, project_out = loader.projections()
    rope = config.rope
    layers = []
    for index in range(config.num_layers):
        layers.append(loader.layer(index))
        if on_part is not None:
            on_part((index + 1) / config.num_layers)
    return Decoder(
        config=config_of_part,
        token_embedding=token_embedding,
        position_embedding=loader.position_embedding(),
        project_in=project_in,
        project_out=project_out,
        layers=tuple(layers),
        final_norm=loader.final_norm(),
        head=loader.head(token_embedding),
        inverse_frequencies=None if rope is None else inverse_frequencies(rope, config.head_dim, device),
        num_parameters=loader.num_parameters_read,
        weight_bytes=loader.num_bytes_kept,
        model_part=model_part,
    )


def named_dtype(name: str) -> torch.dtype:
    """The dtype with this name in torch."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), "settings, config.json and files name dtypes only"
    return dtype
