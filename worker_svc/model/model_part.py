"""The part of a model that one rank of a tensor-parallel group holds: heads, columns, rows of the vocabulary.

Attention is divided by heads, the inner dimension of an MLP and the vocabulary by columns; where there are fewer key
and value heads than ranks, ranks share them by holding the same ones. Needs no torch: a model that cannot be divided is
refused before torch is loaded.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from worker_svc.model.config import ModelConfig
from worker_svc.option_check import OptionError

MOST_RANKS = 32


class Span(NamedTuple):
    """Consecutive rows or columns of a tensor, from `begin` to before `end`."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The part with number `rank` of `size` parts."""

    rank: int = 0
    size: int = 1

    @property
    def is_whole(self) -> bool:
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """True for the rank that adds what must be added once, such as the bias of a product that is summed."""
        return self.rank == 0

    def span_of(self, total: int) -> Span:
        """Equal part of `total`; the last ranks have less if it does not divide."""
        part = -(-total // self.size)
        return Span(min(total, self.rank * part), min(total, (self.rank + 1) * part))

    def span_of_kv(self, config: ModelConfig) -> Span:
        """Columns of the keys, or values, of this rank's heads, in a model of `config`."""
        num_ranks_of_head = max(1, self.size // config.num_kv_heads)
        num_heads = num_kv_heads_of(config, self.size)
        first = self.rank // num_ranks_of_head * num_heads
        return Span(first * config.head_dim, (first + num_heads) * config.head_dim)


WHOLE = ModelPart()


def num_kv_heads_of(config: ModelConfig, num_ranks: int) -> int:
    """Number of key and value heads that each rank holds."""
    return max(1, config.num_kv_heads // num_ranks)


def rank_config(config: ModelConfig, num_ranks: int) -> ModelConfig:
    """The shape of one rank's part: its heads and its inner dimension; hidden size and vocabulary stay the model's.

    Raises OptionError if the model cannot be divided so.
    """
    check_divisible(config, num_ranks)
    return replace(
        config,
        num_heads=config.num_heads // num_ranks,
        num_kv_heads=num_kv_heads_of(config, num_ranks),
        intermediate_size=config.intermediate_size // num_ranks,
    )


def check_divisible(config: ModelConfig, num_ranks: int) -> None:
    """Raises OptionError, which names the numbers of ranks that this model can be divided by."""
    if _divides(config, num_ranks):
        return
    possible = [each for each in range(1, MOST_RANKS + 1) if _divides(config, each)]
    raise OptionError(
        f"--tensor-parallel {num_ranks} does not divide this model of {config.num_heads} attention heads, "
        f"{config.num_kv_heads} key and value heads and an intermediate size of {config.intermediate_size}: "
        f"give --tensor-parallel {_listed(possible)}"
    )


def _divides(config: ModelConfig, num_ranks: int) -> bool:
    heads = config.num_kv_heads
    return (
        config.num_heads % num_ranks == 0
        and config.intermediate_size % num_ranks == 0
        and (heads % num_ranks == 0 or num_ranks % heads == 0)
        and min(config.vocab_size, config.max_model_len) >= num_ranks**2  # so that every rank has rows of each table
    )


def _listed(numbers: Iterable[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
