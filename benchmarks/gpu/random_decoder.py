"""A decoder of a given shape with random weights, made where it is to run: no file is written or read.

What it says means nothing; what it costs to run is what a trained one of its shape costs.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.random_models import ModelShape
from worker_svc.checkpoint.weight_reader import WeightReader
from worker_svc.model.config import Family, ModelConfig, RopeConfig
from worker_svc.model.decoder import Decoder, make_decoder
from worker_svc.model.tensor_names import HEAD

_STD = 0.02


def random_decoder(shape: ModelShape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Decoder:
    """A LLaMA."""
    return make_decoder(
        _RandomReader(dtype, device, seed, tied=shape.tied), decoder_config(shape, dtype), dtype, device
    )


class _RandomReader(WeightReader):
    """Has every tensor: norms are ones, matrices normally distributed."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int, *, tied: bool) -> None:
        super().__init__(Path("random"))
        self._tied = tied
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def __contains__(self, name: object) -> bool:
        return name != HEAD or not self._tied

    def read(self, name: str, shape: Sequence[int], part: Sequence[slice] = ()) -> Tensor:
        assert not part, "a whole model"
        if len(shape) == 1:
            return torch.ones(tuple(shape), dtype=self._dtype, device=self._device)
        return torch.empty(tuple(shape), dtype=self._dtype, device=self._device).normal_(
            std=_STD, generator=self._generator
        )


def decoder_config(shape: ModelShape, dtype: torch.dtype) -> ModelConfig:
    """The configuration of a LLaMA of this shape."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        family=Family.LLAMA,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        embed_dim=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        max_model_len=shape.max_model_len,
        activation="silu",
        gated_mlp=True,
        rms_norm=True,
        norm_eps=1e-5,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        rope=RopeConfig(theta=shape.rope_theta),
        sliding_windows=(None,) * shape.num_layers,
        tie_word_embeddings=shape.tied,
        dtype=str(dtype).removeprefix("torch."),
        eos_token_ids=(),
    )
