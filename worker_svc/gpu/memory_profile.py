"""Uses of a device's memory, and the rest for the KV pool. Pure arithmetic."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Bytes by use, measured with a small trial pool."""

    total: int
    free: int  # while the runner was idle, without graphs
    weights: int
    trial_pool: int
    buffers: int  # that the runner keeps
    activations: int  # at most, during the largest step
    graphs: int

    @property
    def others(self) -> int:
        """Memory outside our tensors: the device's context, libraries, kernels, and other processes."""
        return self.total - self.free - self.weights - self.trial_pool - self.buffers

    @property
    def available(self) -> int:
        """Memory for the pool: free memory and that of the trial pool, less activations and graphs."""
        return max(0, self.free + self.trial_pool - self.activations - self.graphs)

    @property
    def parts(self) -> dict[str, int]:
        """Memory of the device by use, in bytes; their sum is the total, unless more is needed than available."""
        return {
            "weights": self.weights,
            "buffers": self.buffers,
            "activations": self.activations,
            "graphs": self.graphs,
            "others": self.others,
            "available": self.available,
        }
