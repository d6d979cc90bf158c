"""What a decoder is, in numbers: one `ModelConfig` for all families, read from a checkpoint's folder.

How each family spells these numbers in its config.json is in `families.py`; tensor names are in `weights.py`.
"""

import math
from dataclasses import dataclass
from enum import Enum

import torch

from worker_svc.checkpoint import CheckpointError


class Family(Enum):
    """Model families by how their checkpoints are laid out."""

    LLAMA = "llama"  # and Mistral, Qwen2, Qwen3
    OPT = "opt"
    GPT2 = "gpt2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies are slowed by `factor`, high ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: frequencies theta^(-2i / head_dim), scaled."""

    theta: float
    linear_factor: float = 1.0  # all frequencies are divided by it
    llama3: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder and the special ids of its tokenizer."""

    architecture: str  # as the checkpoint names it
    family: Family
    vocab_size: int
    hidden_size: int
    embed_dim: int  # of the token embedding; other than hidden_size it is projected in and out
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_model_len: int
    activation: str
    gated_mlp: bool
    rms_norm: bool  # else layer norm
    norm_eps: float
    norm_weights: bool = True  # false: normalise without scale and shift
    norm_before: bool = True  # false: after the residual addition
    final_norm: bool = True
    qk_norm: bool = False
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    rope: RopeConfig | None  # None: learned positions
    position_offset: int = 0  # rows of the learned table before position 0
    sliding_windows: tuple[int | None, ...]  # per layer
    tie_word_embeddings: bool
    dtype: torch.dtype  # of the checkpoint
    bos_token_id: int | None
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: {self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads "
                "evenly; check num_attention_heads and num_key_value_heads"
            )

    @property
    def attention_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
