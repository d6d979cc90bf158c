"""A rank's place in its group while its runner is started: how it reduces, and how ranks agree."""

from collections.abc import Callable
from typing import NamedTuple

from kernels.native.shared_ranks import RankReduction


class RankPlace(NamedTuple):
    """A rank of a group whose ranks have loaded their weights."""

    reduction: RankReduction
    agree_on_least: Callable[[int], int]  # the least of all ranks' numbers, given at the same point of their start
    num_on_machine: int  # ranks of the group that share its machine
    compiles: bool  # kernels, before they are launched; a rank that does not finds what rank 0 has compiled
