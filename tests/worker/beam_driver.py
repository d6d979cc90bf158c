"""A beam search by hand over a runner: which seat computes which beam, and how blocks follow the hypotheses.

It stands in for the scheduler in the worker's tests: every beam with a row is described whole, siblings share what is
full, and all but one of them get a copy of the last block that is not.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.sampling_params import SequenceSampling
from common.step import Candidates, SequenceState, Step
from scheduler_svc.core.beam_search import BeamSearch, BeamSearchParams, Candidate


@dataclass(slots=True)
class Beam:
    """A hypothesis and the blocks of what is computed of it."""

    token_ids: list[int]
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)


class BeamDriver:
    """One request. `blocks` are its own to hand out; beam i has seat first_seat + i."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: BeamSearchParams,
        sampling: SequenceSampling,
        *,
        blocks: Sequence[int],
        block_size: int,
        first_seat: int = 0,
    ) -> None:
        self.search = BeamSearch(params)
        self.beams = [Beam(list(prompt))]
        self.free_blocks = list(blocks)
        self.ref_counts: Counter[int] = Counter()
        self.num_copies = 0
        self.num_shared = 0  # the most blocks that had several holders
        self._num_prompt_tokens = len(prompt)
        self._sampling = sampling
        self._block_size = block_size
        self._first_seat = first_seat
        self._copies: list[int] = []  # of the next step

    def add_rows(self, step: Step, chunk: int = 1000) -> int:
        """Has every beam computed, `chunk` tokens at most. Returns how many are ranked."""
        step.rows, step.num_tokens = list(step.rows), list(step.num_tokens)
        step.copies = [*step.copies, *self._copies]
        self._copies = []
        candidates: list[int] = []
        for index, beam in enumerate(self.beams):
            count = min(chunk, len(beam.token_ids) - beam.num_computed)
            self._grow(beam, beam.num_computed + count)
            step.whole.append(self._state(self._first_seat + index, beam))
            beam.num_computed += count
            if beam.num_computed == len(beam.token_ids):
                candidates += [len(step.rows), self.search.num_candidates]
            step.rows.append(self._first_seat + index)
            step.num_tokens.append(count)
        step.candidates = [*step.candidates, *candidates]
        return len(candidates) // 2

    def take(self, ranked: Sequence[Candidates]) -> list[int]:
        """Goes on with the survivors. Returns the blocks that are free now."""
        if not ranked:  # within the prompt
            return []
        options = [[Candidate(*pair) for pair in zip(each.token_ids, each.logprobs, strict=True)] for each in ranked]
        before, parents = self.beams, set[int]()
        self.beams = []
        held = Counter(self.ref_counts)
        for survivor in self.search.advance(options):
            parent = before[survivor.parent]
            table = list(parent.block_table)
            self.ref_counts.update(table)
            if survivor.parent in parents and parent.num_computed % self._block_size:
                self.ref_counts[table[-1]] -= 1
                table[-1] = self._copied(table[-1])
            parents.add(survivor.parent)
            self.beams.append(Beam([*parent.token_ids, survivor.token_id], parent.num_computed, table))
        for beam in before:
            self.ref_counts.subtract(beam.block_table)
        freed = [block for block in held if not self.ref_counts[block]]
        self.ref_counts = +self.ref_counts
        self.free_blocks += freed
        self.num_shared = max(self.num_shared, sum(count > 1 for count in self.ref_counts.values()))
        return freed

    def move(self, blocks: Sequence[int]) -> dict[int, int]:
        """Lets all beams hold others of `blocks` instead, as shared as before. Returns new by old."""
        self.free_blocks = list(blocks)
        moved = {block: self.free_blocks.pop() for block in self.ref_counts}
        self.ref_counts = Counter({moved[block]: count for block, count in self.ref_counts.items()})
        self._copies[::2] = [moved[block] for block in self._copies[::2]]
        self._copies[1::2] = [moved[block] for block in self._copies[1::2]]
        for beam in self.beams:
            beam.block_table = [moved[block] for block in beam.block_table]
        return moved

    def _copied(self, block: int) -> int:
        own = self._allocate()
        self._copies += (block, own)
        self.num_copies += 1
        return own

    def _grow(self, beam: Beam, num_tokens: int) -> None:
        while len(beam.block_table) * self._block_size < num_tokens:
            beam.block_table.append(self._allocate())

    def _allocate(self) -> int:
        block = self.free_blocks.pop()  # the last that was freed: what should not be read any more is overwritten
        self.ref_counts[block] += 1
        return block

    def _state(self, seat: int, beam: Beam) -> SequenceState:
        return SequenceState(
            seat=seat,
            position=beam.num_computed,
            block_table=list(beam.block_table),
            token_ids=beam.token_ids[beam.num_computed :],
            history=beam.token_ids[: beam.num_computed] if self._sampling.needs_history else (),
            num_prompt_tokens=self._num_prompt_tokens,
            sampling=self._sampling,
        )
