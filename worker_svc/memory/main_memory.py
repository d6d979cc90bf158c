"""How much of the main memory a worker on a CPU may take for its KV pool, beside its weights and everybody else.

Pure: what is free and what is taken is handed in.
"""

from dataclasses import dataclass

_OWN_FRACTION = 0.9  # of memory that is for this worker alone; the rest is for what nobody foresaw
_OPEN_FRACTION = 0.5  # where other workers may be on the machine, whose pools are taken only as they are used
_LEAST_FRACTION = 0.25  # of what is free, where step buffers would take nearly all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class MainMemory:
    """What there is, in bytes, once the weights are loaded."""

    free: int  # that could be taken now
    taken: int  # by this process, weights among it
    share: int | None  # for this worker in all, if whoever started it divided the memory up
    is_limited: bool  # by a container, which is this worker's alone

    @property
    def available(self) -> int:
        """What this worker may still take."""
        return self.free if self.share is None else max(0, min(self.free, self.share - self.taken))

    @property
    def fraction(self) -> float:
        """Of what is available, for a pool of which no size was asked for."""
        return _OWN_FRACTION if self.share is not None or self.is_limited else _OPEN_FRACTION

    def for_pool(self, step_bytes: int) -> int:
        """What is available beside the buffers of a step."""
        return max(self.available - step_bytes, int(self.available * _LEAST_FRACTION))
