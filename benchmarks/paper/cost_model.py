"""Time of a step on the paper's machines: a line through its Fig. 1, and one cost of a prompt token.

The same for every system and every figure. It knows nothing of attention: neither of how long contexts are, nor of how
a kernel reads blocks.
"""

from dataclasses import dataclass

from benchmarks.paper.published import BLOCK_SIZES, FIG1_THROUGHPUT, FIG19A_SWAP

# A prompt token of a model of 13 B parameters is 26 GFLOP, and 170 TFLOP/s of an A100's 312 are reached.
PROMPT_TOKEN_S = 26e9 / 170e12
SWAP_TOKENS = 256  # of the sequence that Fig. 19a swaps: 12.5 GB/s of an A100's link fit no other
SLOWER = 1.17  # the other reading: with all costs so much higher, OPT-13B's rates on ShareGPT are those of Fig. 12


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Costs in seconds. A step costs a fixed time, plus a time for each sequence and each prompt token."""

    step_s: float
    sequence_s: float
    prompt_token_s: float
    swap_token_s: float = 0.0  # one direction
    swap_block_s: float = 0.0  # one direction: the copies of a block, small as they are

    def of(self, num_sequences: int, num_prompt_tokens: int) -> float:
        """Time of a step with this many sequences and prompt tokens."""
        return self.step_s + self.sequence_s * num_sequences + self.prompt_token_s * num_prompt_tokens

    def of_swap(self, num_blocks: int, block_size: int) -> float:
        """Time to move this many blocks in one direction."""
        return num_blocks * (self.swap_block_s + block_size * self.swap_token_s)

    def scaled(self, factor: float) -> "CostModel":
        """Multiply all costs by a factor."""
        return CostModel(
            step_s=self.step_s * factor,
            sequence_s=self.sequence_s * factor,
            prompt_token_s=self.prompt_token_s * factor,
            swap_token_s=self.swap_token_s * factor,
            swap_block_s=self.swap_block_s * factor,
        )


def fitted() -> CostModel:
    """Fit steps to Fig. 1 and swaps to Fig. 19a, by least squares."""
    step_s, sequence_s = _line([(batch, batch / rate) for batch, rate in FIG1_THROUGHPUT.items()])
    num_blocks = [SWAP_TOKENS / size for size in BLOCK_SIZES]
    both_ways_s, per_block_s = _line([(n, ms / 1e3) for n, ms in zip(num_blocks, FIG19A_SWAP, strict=True)])
    return CostModel(
        step_s=step_s,
        sequence_s=sequence_s,
        prompt_token_s=PROMPT_TOKEN_S,
        swap_token_s=both_ways_s / 2 / SWAP_TOKENS,
        swap_block_s=per_block_s / 2,
    )


def largest_residual_s(model: CostModel) -> float:
    """Largest distance from Fig. 1's points."""
    return max(abs(batch / rate - model.of(batch, 0)) for batch, rate in FIG1_THROUGHPUT.items())


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Offset and slope of the straight line nearest to the points."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope
