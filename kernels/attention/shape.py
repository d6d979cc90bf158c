"""Types of all attention kernels: the shape that a model fixes, the rule from products to scores, and results.

Knows no plan, no launch and no Triton.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MIN_DOT_ROWS = 16  # the least height of a tensor-core tile
_LEAST_PAIRED_DIM = 128  # padded dimension, of which halves have 64 columns


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Shape of attention over blocks, fixed by the model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of queries and results
    kv_dtype: torch.dtype  # the same, or float8_e4m3fn

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, "every key-value head must have equally many heads"
        assert self.kv_dtype in (self.dtype, torch.float8_e4m3fn), f"no keys of {self.kv_dtype} for {self.dtype}"

    @property
    def group(self) -> int:
        """Heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def dot_rows(self) -> int:
        """The group padded to a tile."""
        return max(MIN_DOT_ROWS, power_of_2(self.group))

    @property
    def padded_dim(self) -> int:
        return max(MIN_DOT_ROWS, power_of_2(self.head_dim))

    @property
    def has_short_halves(self) -> bool:
        """True if values are multiplied in halves of less than 64 columns, as those of e4m3 in small heads are.

        Of those Hopper's matrix units get wrong products, or addresses out of range, from code of Triton 3.6 (on an
        H200; halves of 64 columns are right, and so are 32 columns of 16-bit values). Tiles of fewer rows than the
        units take are multiplied without them.
        """
        return self.kv_dtype.itemsize < self.dtype.itemsize == 2 and self.padded_dim < _LEAST_PAIRED_DIM


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """From a product of query and key to a score: soft_cap * tanh(scale * q k / soft_cap)."""

    scale: float
    soft_cap: float | None = None

    def scores(self, products: Tensor) -> Tensor:
        """Scores of products, in torch."""
        scores = products * self.scale
        return scores if self.soft_cap is None else self.soft_cap * torch.tanh(scores / self.soft_cap)


class Attended(NamedTuple):
    """Results of attention."""

    out: Tensor  # [R, num_heads, head_dim], the dtype of query
    lse: Tensor | None  # [R, num_heads] float32, natural logarithm of the sum of exp(score), if asked for


def power_of_2(number: int) -> int:
    """The least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def assert_fits(shape: AttentionShape, query: Tensor, key_cache: Tensor, value_cache: Tensor, block_size: int) -> None:
    """Assert what every attention kernel assumes of its arguments.

    query:                  [any, num_heads, head_dim], head_dim contiguous
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], any strides with head_dim contiguous
    """
    assert query.shape[1:] == (shape.num_heads, shape.head_dim), "not the plan's queries"
    assert key_cache.shape[1:] == (block_size, shape.num_kv_heads, shape.head_dim), "not the plan's blocks"
    assert query.stride(2) == key_cache.stride(3) == value_cache.stride(3) == 1
    assert max(*key_cache.stride(), *value_cache.stride()) < 1 << 31, "offsets are products of numbers of 32 bits"
    assert shape.kv_dtype == shape.dtype or shape.head_dim % 2 == 0, "e4m3 is read in pairs"


def launch_strides(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor) -> tuple[int, ...]:
    """Strides that every attention kernel gets at its launch, in order."""
    return (*query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3], block_tables.stride(0))
