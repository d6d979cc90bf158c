"""The parts of a loaded worker, the same for a model and for a simulation of one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from worker_svc.description import WorkerDescription
from worker_svc.steps.fetched_blocks import FetchedBlocks
from worker_svc.steps.step_runner import StepRunner


class BlockReader(Protocol):
    """Reader of the pool's blocks; one thread uses it."""

    most_blocks: int  # of one call
    num_blocks: int  # of the pool

    def read(self, block_ids: Sequence[int]) -> memoryview:
        """Content of blocks, one after the other; valid until the next call."""


@dataclass(frozen=True, slots=True)
class TravellingBlocks:
    """Ways of blocks out of the pool and into it."""

    format: str  # as in PoolInfo
    reader: BlockReader
    fetched: FetchedBlocks  # which the runner takes


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner and the description of its worker."""

    runner: StepRunner
    description: WorkerDescription
    close: Callable[[], None] = lambda: None  # ends the other ranks of a tensor-parallel group
    travel: TravellingBlocks | None = None  # None: blocks stay where they are
