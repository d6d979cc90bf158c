"""Costs of a worker's swaps, prefill and decoding, learnt from its steps, and of fetches to it.

They are used by `auto` and by deadlines.

Pure: gets plans and results, gives averages. Knows nothing of their use.
"""

from dataclasses import astuple, dataclass, field

from common.step import StepResult
from scheduler_svc.core.preemption import PreemptionCosts
from scheduler_svc.core.step_plan import StepPlan

SWAP_WINDOW_BLOCKS = 2048
PREFILL_WINDOW_TOKENS = 16_384
DECODE_WINDOW_STEPS = 16
NOTICEABLE_CHANGE = 0.1  # of a figure, since it was last returned


@dataclass(slots=True)
class Speed:
    """Amounts per second: a moving average over about the last `window`, in which a sample weighs what it moved.

    So a large step, which shows what the device can do, is not outweighed by many small ones, which show what a step
    costs at least. The first sample is left out: it pays for memory touched, and code compiled, for the first time.
    """

    window: int
    per_s: float | None = None  # unknown before the second sample
    amount: float | None = None  # of a sample, averaged in the same way
    _num_seen: int = 0
    _is_warm: bool = False

    def add(self, amount: int, duration_ns: int) -> None:
        """Add a sample; one without an amount or a duration is ignored."""
        if amount <= 0 or duration_ns <= 0:
            return
        if not self._is_warm:
            self._is_warm = True
            return
        self._num_seen = min(self._num_seen + amount, self.window)
        weight = min(1.0, amount / self._num_seen)
        sample = amount * 1e9 / duration_ns
        self.per_s = sample if self.per_s is None else self.per_s + (sample - self.per_s) * weight
        self.amount = amount if self.amount is None else self.amount + (amount - self.amount) * weight


@dataclass(slots=True)
class StepCosts:
    """Costs of one worker, since it came."""

    swap: Speed = field(default_factory=lambda: Speed(SWAP_WINDOW_BLOCKS))  # blocks, in one direction
    fetch: Speed = field(default_factory=lambda: Speed(SWAP_WINDOW_BLOCKS))  # blocks from other workers
    prefill: Speed = field(default_factory=lambda: Speed(PREFILL_WINDOW_TOKENS))  # tokens
    decode_ns: float = 0.0  # of a step that only decodes, a moving average; 0: none was measured
    _returned: PreemptionCosts | None = None

    def learn(self, plan: StepPlan, result: StepResult) -> PreemptionCosts | None:
        """Learn from an executed step. Returns the costs if they have changed noticeably since they were last returned.

        None, too, before any prefill was measured: the speed of swaps alone decides nothing. A step whose swaps took
        time is no measure of prefill: a worker may swap while it computes, so the time of swaps cannot be subtracted.
        """
        num_moved = (len(plan.swap_out) + len(plan.swap_in)) // 2
        num_tokens = sum(plan.num_tokens)
        if not num_moved and num_tokens == len(plan.num_tokens):
            if result.exec_ns > 0:  # decoding: most steps
                more_ns = result.exec_ns - self.decode_ns
                self.decode_ns += more_ns / DECODE_WINDOW_STEPS if self.decode_ns else more_ns
            return None
        self.swap.add(num_moved, result.swap_ns)
        num_prompt_tokens = sum(n for n in plan.num_tokens if n > 1)
        if 2 * num_prompt_tokens > num_tokens and not result.swap_ns:
            self.prefill.add(num_tokens, result.exec_ns)
        return self._news()

    def learn_fetch(self, num_blocks: int, duration_ns: int) -> PreemptionCosts | None:
        """Learn from a fetch. Returns the costs as `learn` does."""
        self.fetch.add(num_blocks, duration_ns)
        return self._news()

    def _news(self) -> PreemptionCosts | None:
        if self.prefill.per_s is None:
            return None
        costs = PreemptionCosts(
            prefill_tokens_per_s=self.prefill.per_s,
            prefill_step_tokens=self.prefill.amount,
            swap_blocks_per_s=self.swap.per_s,
            fetch_blocks_per_s=self.fetch.per_s,
            decode_step_s=self.decode_ns / 1e9 or None,
        )
        if self._returned is not None and not any(map(_has_changed, astuple(self._returned), astuple(costs))):
            return None
        self._returned = costs
        return costs


def _has_changed(told: float | None, known: float | None) -> bool:
    if told is None or known is None:
        return told is not known
    return abs(known - told) > NOTICEABLE_CHANGE * told
