"""Main memory that a worker on a CPU may take for its KV pool, beside its weights and other processes.

Pure: sizes of free and taken memory are passed in.
"""

from dataclasses import dataclass

_OWN_FRACTION = 0.9  # of memory that is for this worker alone; the rest is a reserve
_OPEN_FRACTION = 0.5  # if the machine may have other workers, whose pools take memory only as they are used
_LEAST_FRACTION = 0.25  # of the free memory, if step buffers would take nearly all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class MainMemory:
    """Free and taken memory in bytes, once the weights are loaded."""

    free: int
    taken: int  # by this process, including weights
    share: int | None  # most that this worker may take in all, if the starter divided the memory among several
    is_limited: bool  # by a container that has this worker alone

    @property
    def available(self) -> int:
        """Bytes that this worker may still take."""
        return self.free if self.share is None else max(0, min(self.free, self.share - self.taken))

    @property
    def fraction(self) -> float:
        """Part of the available memory for a pool without a configured size."""
        return _OWN_FRACTION if self.share is not None or self.is_limited else _OPEN_FRACTION

    def for_pool(self, step_bytes: int) -> int:
        """Bytes that are available beside the buffers of a step."""
        return max(self.available - step_bytes, int(self.available * _LEAST_FRACTION))
