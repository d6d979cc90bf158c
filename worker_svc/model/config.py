"""`ModelConfig`, the shape of a decoder: one for all families, read from a checkpoint's folder.

`families.py` reads the numbers from each family's config.json; `tensor_names.py` has the names of tensors. Neither
needs torch: a wrong config is refused before torch is loaded.
"""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Literal

Activation = Literal["relu", "silu", "gelu", "gelu_tanh"]  # names of `kernels.layers.layer_ops`


class Family(Enum):
    """Model families by the layout of their checkpoints."""

    LLAMA = "llama"  # and Mistral, Qwen2, Qwen3
    OPT = "opt"
    GPT2 = "gpt2"
    OLMO2 = "olmo2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies are slowed by `factor`, high ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Low frequencies are slowed by `factor`, high ones kept, those between interpolated (arXiv 2309.00071).

    The range between is given in turns over the original context: from `beta_slow` to `beta_fast`.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    attention_factor: float  # of queries and of keys
    truncate: bool  # round the ends of the range to whole dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: frequencies theta^(-2i / head_dim), scaled."""

    theta: float
    linear_factor: float = 1.0  # all frequencies are divided by it
    llama3: Llama3Scaling | None = None
    yarn: YarnScaling | None = None


class NormPlace(Enum):
    """Place of a layer's norms beside the residual addition."""

    BEFORE = "before"  # x + f(norm(x))
    AFTER_SUM = "after_sum"  # norm(x + f(x))
    ON_OUTPUT = "on_output"  # x + norm(f(x))


class QkNorm(Enum):
    """Vectors of queries and of keys that are normalized before rotation."""

    HEADS = "heads"  # each head by itself, all with the same weights
    PROJECTIONS = "projections"  # all heads of a token as one vector


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder and the special ids of its tokenizer."""

    architecture: str  # as in config.json
    family: Family
    vocab_size: int
    hidden_size: int
    embed_dim: int  # of the token embedding; projected in and out if it differs from hidden_size
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_model_len: int
    activation: Activation
    gated_mlp: bool
    rms_norm: bool  # else layer norm
    norm_eps: float
    norm_weights: bool = True  # false: normalise without scale and shift
    norm_place: NormPlace = NormPlace.BEFORE
    final_norm: bool = True
    qk_norm: QkNorm | None = None
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    rope: RopeConfig | None  # None: learned positions
    position_offset: int = 0  # rows of the learned table before position 0
    sliding_windows: tuple[int | None, ...]  # per layer
    tie_word_embeddings: bool
    dtype: str | None  # of the checkpoint, as torch names it, "bfloat16"; None: as its tensors are stored
    eos_token_ids: tuple[int, ...]

    @property
    def attention_scale(self) -> float:
        """Scale of scores. Includes the factor that YaRN applies to both queries and keys."""
        yarn = self.rope.yarn if self.rope is not None else None
        return (yarn.attention_factor**2 if yarn is not None else 1.0) / math.sqrt(self.head_dim)

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Sizes of the norms of queries and of keys, where there are any."""
        if self.qk_norm is QkNorm.PROJECTIONS:
            return self.query_size, self.kv_size
        return self.head_dim, self.head_dim

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
