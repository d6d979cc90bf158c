"""Uses of a device's memory, and the rest for the KV pool. Pure arithmetic."""

from dataclasses import dataclass

GRAPH_PART = 8  # graphs take at most about 1 / 8 of the memory that steps leave


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
    max_mixed_tokens: int  # of the largest graph with prompts

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


def graph_tokens(profile: MemoryProfile, max_batched_tokens: int) -> int:
    """Tokens of the largest graph with prompts, so that graphs keep within their part of the memory.

    A graph needs the memory of its step, which grows with its tokens, and all graphs share that of the largest.
    """
    room = profile.available // GRAPH_PART
    if profile.activations <= room:
        return max_batched_tokens
    return max_batched_tokens * room // profile.activations
