"""Decoders of a given shape without weights: only the host's work remains.

Either products only make their output, on a CPU, or all tensors are on torch's `meta` device, which has no content: a
read by the host raises. So the largest model takes a few megabytes.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.random_decoder import decoder_config
from benchmarks.random_models import ModelShape
from worker_svc.checkpoint.weight_reader import WeightReader
from worker_svc.model.decoder import Decoder, make_decoder
from worker_svc.model.layers import Linear, Norm, Product

_DTYPE = torch.bfloat16
_CPU = torch.device("cpu")


def stub_decoder(shape: ModelShape) -> Decoder:
    """A LLaMA in bfloat16 on a CPU."""
    config = decoder_config(shape, _DTYPE)
    one = replace(config, num_layers=1, sliding_windows=config.sliding_windows[:1])
    decoder = make_decoder(_ShapeReader(), one, _DTYPE, _CPU, _OutputOnly)
    return replace(decoder, config=config, layers=decoder.layers * config.num_layers)


def meta_decoder(shape: ModelShape) -> Decoder:
    """A LLaMA in bfloat16 without content."""
    decoder = stub_decoder(shape)
    layer = decoder.layers[0]
    attention, mlp = layer.attention, layer.mlp
    layer = replace(
        layer,
        attention=replace(attention, qkv=_on_meta(attention.qkv), out=_on_meta(attention.out)),
        mlp=replace(mlp, up=_on_meta(mlp.up), down=_on_meta(mlp.down)),
        attention_norm=_norm_on_meta(layer.attention_norm),
        mlp_norm=_norm_on_meta(layer.mlp_norm),
    )
    assert decoder.final_norm is not None and decoder.inverse_frequencies is not None, "a LLaMA has both"
    return replace(
        decoder,
        token_embedding=decoder.token_embedding.to("meta"),
        layers=(layer,) * shape.num_layers,
        final_norm=_norm_on_meta(decoder.final_norm),
        head=_on_meta(decoder.head),
        inverse_frequencies=decoder.inverse_frequencies.to("meta"),
    )


def _on_meta(product: Product) -> Linear:
    assert isinstance(product, _OutputOnly), "of a stub"
    return Linear(torch.empty(product.shape, dtype=_DTYPE, device="meta"), None)


def _norm_on_meta(norm: Norm) -> Norm:
    return replace(norm, weight=None if norm.weight is None else norm.weight.to("meta"))


class _OutputOnly:
    """The output of a product, without content."""

    def __init__(self, weight: Tensor, _bias: Tensor | None) -> None:
        self.shape = weight.shape
        self.nbytes = weight.nbytes  # as if there were one

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.empty((len(x), self.shape[0]), dtype=x.dtype, device=x.device) if out is None else out


class _ShapeReader(WeightReader):
    """Has every tensor: one number, seen as all of its elements."""

    def __init__(self) -> None:
        super().__init__(Path("shapes"))

    def __contains__(self, name: object) -> bool:
        return True

    def read(self, name: str, shape: Sequence[int], part: Sequence[slice] = ()) -> Tensor:
        assert not part, "a whole model"
        return torch.zeros((1,) * len(shape), dtype=_DTYPE).expand(tuple(shape))
