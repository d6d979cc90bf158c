"""Steps whose host time is measured: rows that decode, and a prompt's chunk beside them or not.

Rows are at different places in their blocks, so that each step some get a new block, as in serving.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from common.sampling_params import SequenceSampling
from common.step import SequenceState, Step
from worker_svc.steps.step_limits import StepLimits

SAMPLING = SequenceSampling(seed=0, temperature=0.8, top_p=0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoad:
    """Steps of one kind."""

    num_decode: int  # rows of one token
    chunk: int  # tokens of a prompt that comes and goes within each step; 0: none
    context: int = 1000  # tokens of the shortest row that decodes; row i has i % 16 more
    shared_blocks: int = 0  # with which all rows that decode begin

    @property
    def num_seats(self) -> int:
        """Seats that the steps use."""
        return self.num_decode + bool(self.chunk)

    def steps(self, limits: StepLimits, num_steps: int) -> Iterator[Step]:
        """A snapshot that places the rows, and then `num_steps` steps."""
        seats = range(self.num_decode)
        lengths = [self.context + seat % limits.block_size for seat in seats]
        whole = [self._state(seat, length, [1], length, limits) for seat, length in zip(seats, lengths, strict=True)]
        yield Step(epoch=1, step_id=0, snapshot=True, whole=whole, rows=seats)
        for step_id in range(1, num_steps + 1):
            step = Step(epoch=1, step_id=step_id, rows=list(seats))
            opened = [seat for seat in seats if (lengths[seat] + step_id) % limits.block_size == 0]
            step.append_pairs = [number for seat in opened for number in (seat, limits.num_blocks - 1 - seat)]
            if self.chunk:
                seat = self.num_decode
                step.freed_seats = [seat] if step_id > 1 else []
                step.whole = [self._state(seat, 0, [1] * self.chunk, self.chunk, limits)]
                step.rows = [*seats, seat]
                step.num_tokens = [1] * self.num_decode + [self.chunk]
            yield step

    def _state(
        self, seat: int, position: int, token_ids: list[int], num_prompt_tokens: int, limits: StepLimits
    ) -> SequenceState:
        num_blocks = -(-(position + len(token_ids)) // limits.block_size)
        first = self.shared_blocks + seat * (limits.max_blocks // 2)  # of the row's own
        num_shared = self.shared_blocks if position else 0
        return SequenceState(
            seat=seat,
            position=position,
            block_table=[*range(num_shared), *range(first, first + num_blocks - num_shared)],
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens,
            sampling=SAMPLING,
        )
