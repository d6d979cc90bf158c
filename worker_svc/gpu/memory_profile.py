"""What memory of a device is for, and how much is left for the KV pool. Pure arithmetic."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Bytes, measured beside a runner with a small pool for trial."""

    total: int
    free: int  # while that runner stood still, without graphs
    weights: int
    trial_pool: int
    buffers: int  # that the runner keeps
    activations: int  # at most, during the largest step
    graphs: int

    @property
    def others(self) -> int:
        """What no tensor of ours has: the device's context, libraries, kernels, and other processes."""
        return self.total - self.free - self.weights - self.trial_pool - self.buffers

    @property
    def available(self) -> int:
        """For the pool: what is free once the trial's is given back, less what steps and graphs take beside it."""
        return max(0, self.free + self.trial_pool - self.activations - self.graphs)

    @property
    def parts(self) -> dict[str, int]:
        """All of the device's memory by use, in bytes, unless more is needed than there is."""
        return {
            "weights": self.weights,
            "buffers": self.buffers,
            "activations": self.activations,
            "graphs": self.graphs,
            "others": self.others,
            "available": self.available,
        }
