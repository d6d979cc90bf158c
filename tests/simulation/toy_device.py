"""Device of a simulated worker: blocks that hold checksums of contexts, and seats known only from steps.

It obeys as a real worker does, and says what makes no sense: a seat that is not there, a block that does not hold what
the table says. Sampling seeds of some values make a request poisonous.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.sampling_params import SequenceSampling
from common.step import Candidates, LogprobRows, PromptLogprobs, Step, StepResult, StepStatus
from tests.simulation import toy_model as model
from worker_svc.steps.step_fence import StepFence

NAN_SEED = 7_001  # logits that are not finite, after some tokens
STEP_KILLER_SEED = 7_002  # every step with it raises, after some tokens
WORKER_KILLER_SEED = 7_003  # the worker dies of it, after some tokens
POISON_AFTER = 3


class FatalStepError(Exception):
    """The worker's process ends."""


@dataclass(slots=True)
class ToySeat:
    """`token_ids` are known and not yet computed, the first of them at `position`."""

    position: int
    block_table: list[int]
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SequenceSampling

    @property
    def barred(self) -> Sequence[int]:
        return self.sampling.suppressed_token_ids if self.position < self.sampling.suppressed_until else ()

    def is_poisoned_by(self, seed: int) -> bool:
        return self.sampling.seed == seed and self.position >= self.num_prompt_tokens + POISON_AFTER


class ToyDevice:
    """A block is [checksum before it, checksum after its first token, ...]; None before it was ever written."""

    def __init__(
        self, *, num_blocks: int, num_host_blocks: int, block_size: int, num_seats: int, violate: Callable[[str], None]
    ) -> None:
        self.block_size = block_size
        self.fails_next = False  # the next step raises
        self._violate = violate
        self._fence = StepFence()
        self._seats: dict[int, ToySeat] = {}
        self._num_seats = num_seats
        self._blocks: list[list[int] | None] = [None] * num_blocks
        self._host_blocks: list[list[int] | None] = [None] * num_host_blocks
        self._fetched: dict[tuple[int, int], tuple[list[list[int] | None], int, Callable[[], None]]] = {}

    @property
    def epoch(self) -> int:
        return self._fence.epoch

    def follow(self, epoch: int) -> None:
        """Follow the epoch of a leading scheduler's answer, even if it is lower."""
        self._fence.follow_epoch(epoch)

    def content(self, block: int) -> list[int] | None:
        """Copy of what a block holds."""
        held = self._blocks[block]
        return None if held is None else list(held)

    def keep_fetched(
        self,
        epoch: int,
        fetch_id: int,
        blocks: list[list[int] | None],
        num_blocks: int,
        on_placed: Callable[[], None],
    ) -> None:
        """Keep the blocks of a fetch of `num_blocks` that have come so far. `on_placed`: a step has placed the last."""
        self._fetched[epoch, fetch_id] = (list(blocks), num_blocks, on_placed)

    def forget_fetch(self, epoch: int, fetch_id: int) -> None:
        """Forget a fetch, if it is kept."""
        self._fetched.pop((epoch, fetch_id), None)

    def execute(self, step: Step) -> StepResult:
        refusal = self._fence.refusal(step)
        if refusal is not None:
            return refusal
        if not self._has_come(step):
            need = StepStatus.NEED_SNAPSHOT
            return StepResult(epoch=step.epoch, step_id=step.step_id, status=need, error="a block has not come")
        self._update_seats(step)
        self._move(step.swap_out, self._blocks, self._host_blocks)
        self._place(step)
        self._move(step.swap_in, self._host_blocks, self._blocks)
        self._move(step.copies, self._blocks, self._blocks)
        if any(self._seats[seat].is_poisoned_by(WORKER_KILLER_SEED) for seat in step.rows):
            raise FatalStepError
        if self.fails_next or any(self._seats[seat].is_poisoned_by(STEP_KILLER_SEED) for seat in step.rows):
            return self._break_off(step)
        result = StepResult(epoch=step.epoch, step_id=step.step_id)
        counts = step.num_tokens or [1] * len(step.rows)
        self._check_writers(step.rows, counts)
        last = [self._compute(seat, count, result) for seat, count in zip(step.rows, counts, strict=True)]
        self._sample(step, last, result)
        for row, num_wanted in _pairs(step.candidates):
            result.candidates.append(self._candidates(self._seats[step.rows[row]], last[row], num_wanted))
        self._fence.record_executed(step)
        return result

    def _break_off(self, step: Step) -> StepResult:
        """Leave garbage in the blocks that the step would have written, and the seats in disorder."""
        self.fails_next = False
        counts = step.num_tokens or [1] * len(step.rows)
        for number, count in zip(step.rows, counts, strict=True):
            seat = self._seats[number]
            for position in range(seat.position, seat.position + count):
                block = self._blocks[seat.block_table[position // self.block_size]]
                if block is not None:
                    del block[position % self.block_size + 1 :]
        self._seats.clear()
        self._fence.require_snapshot()
        return StepResult(epoch=step.epoch, step_id=step.step_id, status=StepStatus.FAILED, error="it raised")

    def _update_seats(self, step: Step) -> None:
        if step.snapshot:
            self._seats.clear()
        for number in step.freed_seats:
            if self._seats.pop(number, None) is None:
                self._violate(f"seat {number} is freed, and is not there")
        for state in step.whole:
            if not 0 <= state.seat < self._num_seats:
                self._violate(f"there is no seat {state.seat}")
            self._seats[state.seat] = ToySeat(
                state.position, list(state.block_table), list(state.token_ids), state.num_prompt_tokens, state.sampling
            )
        for number, block in _pairs(step.append_pairs):
            self._seats[number].block_table.append(block)

    def _has_come(self, step: Step) -> bool:
        kept = {fetch: blocks for (epoch, fetch), (blocks, _, _) in self._fetched.items() if epoch == step.epoch}
        return all(index < len(kept.get(fetch, ())) for fetch, index, _ in _triples(step.placed))

    def _place(self, step: Step) -> None:
        """Take fetched blocks into the pool; forget a fetch with its last block."""
        for fetch, index, block in _triples(step.placed):
            content = self._fetched[step.epoch, fetch][0][index]
            self._blocks[block] = None if content is None else list(content)
        for fetch, index, _ in _triples(step.placed):
            _, num_blocks, on_placed = self._fetched[step.epoch, fetch]
            if index == num_blocks - 1:
                del self._fetched[step.epoch, fetch]
                on_placed()

    def _move(
        self, pairs: Sequence[int], sources: list[list[int] | None], destinations: list[list[int] | None]
    ) -> None:
        moved = [(destination, sources[source]) for source, destination in _pairs(pairs)]
        if len({destination for destination, _ in moved}) < len(moved):
            self._violate(f"a block is twice the destination of a move: {list(pairs)}")
        for destination, block in moved:
            destinations[destination] = None if block is None else list(block)

    def _check_writers(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        size = self.block_size
        writer_of: dict[int, int] = {}
        for number, count in zip(rows, counts, strict=True):
            seat = self._seats[number]
            for index in range(seat.position // size, (seat.position + count - 1) // size + 1):
                if writer_of.setdefault(seat.block_table[index], number) != number:
                    self._violate(f"two rows of a step write block {seat.block_table[index]}")

    def _compute(self, number: int, count: int, result: StepResult) -> int:
        """The checksum behind the last token that the row computed."""
        seat, size = self._seats[number], self.block_size
        if not 1 <= count <= len(seat.token_ids):
            self._violate(f"{count} tokens of seat {number} are to be computed, and {len(seat.token_ids)} are known")
        checksum = self._context(seat)
        num_prompt_logprobs = seat.sampling.num_prompt_logprobs
        told: list[tuple[int, int]] = []  # checksum before, token
        for index, token_id in enumerate(seat.token_ids[:count]):
            position = seat.position + index
            offset, place = position % size, seat.block_table[position // size]
            block = self._blocks[place]
            if offset == 0 and (block is None or block[0] != checksum):
                block = self._blocks[place] = [checksum]
            assert block is not None
            checksum = model.extended(checksum, token_id)
            if len(block) <= offset + 1 or block[offset + 1] != checksum:
                del block[offset + 1 :]
                block.append(checksum)
            if num_prompt_logprobs is not None and index + 1 < len(seat.token_ids):
                told.append((checksum, seat.token_ids[index + 1]))
        if num_prompt_logprobs is not None and seat.position < seat.num_prompt_tokens - 1:
            told = told[: seat.num_prompt_tokens - 1 - seat.position]
            rows = _logprob_rows(told, num_prompt_logprobs)
            result.prompt_logprobs.append(PromptLogprobs(seat=number, position=seat.position + 1, rows=rows))
        del seat.token_ids[:count]
        seat.position += count
        return checksum

    def _context(self, seat: ToySeat) -> int:
        """The checksum of what the block table leads to, up to the position."""
        checksum, left = model.START, seat.position
        for place in seat.block_table:
            if left <= 0:
                break
            block, num_read = self._blocks[place], min(left, self.block_size)
            if block is None or block[0] != checksum or len(block) <= num_read:
                self._violate(f"block {place} does not hold what a table says: {seat}")
                return -1
            checksum = block[num_read]
            left -= num_read
        if left > 0:
            self._violate(f"a block table is too short: {seat}")
        return checksum

    def _sample(self, step: Step, last: Sequence[int], result: StepResult) -> None:
        pairs = list(enumerate(step.rows)) if step.samples is None else list(_pairs(step.samples))
        token_ids: list[int] = []
        invalid: list[int] = []
        for sample, (row, number) in enumerate(pairs):
            seat, checksum = self._seats[number], last[row]
            sampling = seat.sampling
            if seat.token_ids:
                self._violate(f"seat {number} samples before the end of its tokens")
            if seat.is_poisoned_by(NAN_SEED):
                invalid.append(sample)
            token_id = model.drawn(
                checksum, sampling.seed, sampling.sample_index, seat.barred, is_greedy=sampling.is_greedy
            )
            token_ids.append(token_id)
            seat.token_ids = [token_id]
            if sampling.num_logprobs is not None:
                result.logprobs[sample] = _logprob_rows([(checksum, token_id)], sampling.num_logprobs)
        result.token_ids, result.invalid_samples = token_ids, invalid

    def _candidates(self, seat: ToySeat, checksum: int, num_wanted: int) -> Candidates:
        if seat.is_poisoned_by(NAN_SEED):
            return Candidates(token_ids=(), logprobs=())
        found = model.candidates(checksum, num_wanted, seat.barred)
        rows = None
        if seat.sampling.num_logprobs is not None:
            rows = _logprob_rows([(checksum, token_id) for token_id, _ in found], seat.sampling.num_logprobs)
        return Candidates(token_ids=[each for each, _ in found], logprobs=[each for _, each in found], rows=rows)


def _logprob_rows(told: Sequence[tuple[int, int]], num_top: int) -> LogprobRows:
    top = [(checksum, token_id) for checksum, _ in told for token_id in model.ranking(checksum)[:num_top]]
    return LogprobRows(
        logprobs=[model.logprob(*each) for each in told],
        ranks=[model.rank(*each) for each in told],
        num_top=num_top,
        top_token_ids=[token_id for _, token_id in top],
        top_logprobs=[model.logprob(*each) for each in top],
    )


def _triples(flat: Sequence[int]) -> "zip[tuple[int, int, int]]":
    return zip(flat[::3], flat[1::3], flat[2::3], strict=True)


def _pairs(flat: Sequence[int]) -> "zip[tuple[int, int]]":
    return zip(flat[::2], flat[1::2], strict=True)
