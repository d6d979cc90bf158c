"""Interface of a library of attention kernels, and the choice of them for the passes of a runner.

A library attends to all rows of a pass at once, of one token and of several, through the layers' views of the pool.
Knows no library.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.attention.decode_reference import DecodeRows
from kernels.attention.prefill_reference import PrefillRows
from kernels.attention.shape import AttentionShape, ScoreRule
from worker_svc.gpu.libraries.block_lists import SentBlockLists

HALF_DTYPES = (torch.float16, torch.bfloat16)  # that matrix units of all devices multiply


@dataclass(frozen=True, slots=True, kw_only=True)
class LibrarySetup:
    """Fixed facts of a runner: its model's attention, its pool's blocks, and the most that a pass of it has."""

    shape: AttentionShape
    rule: ScoreRule
    block_size: int
    device: torch.device
    max_rows: int
    max_blocks: int  # of a row
    max_tokens: int


class LibraryPass(Protocol):
    """Attention of one pass, the same for all layers without a sliding window. A launch can be captured."""

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor) -> None:
        """Attend each row's queries, the last of its context, to their keys, causally.

        query:                  [T, num_heads, head_dim], head_dim contiguous
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], views of the pool
        out:                    [T, num_heads, head_dim], contiguous; padding keeps what it has, or gets anything finite
        """


class LibraryPasses(Protocol):
    """Passes of one runner, and their memory. Only one pass may be in use at a time, all on one stream."""

    needs_block_lists: bool  # before each launch of a pass, by `plan_decode` or `plan_mixed`

    def decode(self, rows: DecodeRows) -> LibraryPass:
        """Pass of one token in each row; the tensors are kept, and a launch reads what they hold then."""

    def mixed(self, rows: PrefillRows, num_tokens: int, *, is_padded: bool) -> LibraryPass:
        """Pass of rows of any number of tokens. Rows of padding have no queries and no keys.

        is_padded: to a size that a graph may have, for which `prepare_mixed` was called
        """

    def prepare_mixed(self, num_tokens: int, num_rows: int) -> None:
        """Take the memory of padded passes of this size, so that they can be captured."""

    def plan_decode(self, sent: SentBlockLists) -> None:
        """Plan the next launch of the pass with as many rows."""

    def plan_mixed(self, sent: SentBlockLists, num_tokens: int, *, is_padded: bool) -> None:
        """Plan the next launch of the mixed pass of this size."""


class AttentionLibrary(Protocol):
    """Library that is installed."""

    name: str  # as --attention says it
    version: str

    def why_not(self, shape: AttentionShape, rule: ScoreRule, capability: tuple[int, int]) -> str | None:
        """Reason why it does not compute this attention on a device of that compute capability; None if it does."""

    def why_not_mixed(self, capability: tuple[int, int]) -> str | None:
        """Reason why it computes passes of one token in each row alone; None if also those with chunks of prompts."""

    def passes(self, setup: LibrarySetup) -> LibraryPasses:
        """Passes of a runner."""


class PassLibraries(NamedTuple):
    """Libraries by the kind of pass; None: the runner's own operations."""

    decode: AttentionLibrary | None = None  # every row has one token
    mixed: AttentionLibrary | None = None  # passes with chunks of prompts, their rows of one token too


NO_LIBRARIES = PassLibraries()


def why_not_attention(shape: AttentionShape, rule: ScoreRule) -> str | None:
    """Reason that is the same for all libraries here."""
    if shape.dtype not in HALF_DTYPES:
        return f"it computes in 16 bits, and the model in {_name(shape.dtype)}"
    if shape.kv_dtype != shape.dtype:
        return f"keys and values of {_name(shape.kv_dtype)} need scales that it takes and the pool does not have"
    if rule.soft_cap is not None:
        return "scores have a soft cap"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
