"""A worker that has blocks and seats but no model: KV of a token is the token and a checksum of all up to it.

It obeys plans as a real worker does, knows of a sequence only what plans say, and reads contexts through block tables.
"""

import struct
import zlib
from dataclasses import dataclass

from scheduler_svc.core.step_plan import StepPlan
from tests.scheduler.core_fetches import FetchedKv

VOCAB_SIZE = 17
STOP_TOKEN_ID = 0
KV = tuple[int, int]  # (token id, checksum of the context up to it)


def checksum(previous: int, token_id: int) -> int:
    return zlib.crc32(struct.pack("<i", token_id), previous)


def context_kv(token_ids: list[int]) -> list[KV]:
    """KV that the cache must hold for these tokens."""
    kv = []
    value = 0
    for token_id in token_ids:
        value = checksum(value, token_id)
        kv.append((token_id, value))
    return kv


def next_token(last: KV, sample_index: int = 0) -> int:
    """The model: a pure function of the whole context and of the sample's noise."""
    return (checksum(last[1], sample_index) if sample_index else last[1]) % VOCAB_SIZE


def beam_candidates(last: KV, num_candidates: int) -> list[tuple[int, int]]:
    """The most likely next tokens, best first, as (score, token): the score is lower the worse, and never above 0."""
    scored = [(-(checksum(last[1], 1000 + token_id) % 1000), token_id) for token_id in range(VOCAB_SIZE)]
    return sorted(scored, reverse=True)[:num_candidates]


def choose_survivors(
    scores: list[int], candidates: list[list[tuple[int, int]]], beam_width: int
) -> list[tuple[int, int, int]]:
    """A plain beam search's step: (score, beam, token) of the best continuations of all beams, best first."""
    all_scored = [
        (scores[beam] + score, beam, token_id) for beam, each in enumerate(candidates) for score, token_id in each
    ]
    return sorted(all_scored, key=lambda one: (-one[0], one[1], one[2]))[:beam_width]


def unconstrained_beams(prompt: list[int], max_tokens: int, beam_width: int) -> list[list[int]]:
    """The outputs of a beam search that nothing stands in the way of, best first."""
    beams: list[tuple[int, list[int]]] = [(0, [])]
    for _ in range(max_tokens):
        candidates = [beam_candidates(context_kv(prompt + output)[-1], beam_width) for _, output in beams]
        survivors = choose_survivors([score for score, _ in beams], candidates, beam_width)
        beams = [(score, [*beams[beam][1], token_id]) for score, beam, token_id in survivors]
    return [output for _, output in beams]


def unconstrained_output(
    prompt: list[int], max_tokens: int, stop_token_ids: frozenset[int], sample_index: int = 0
) -> list[int]:
    """Output of the model without interruptions or limits."""
    output: list[int] = []
    last = context_kv(prompt)[-1]
    while len(output) < max_tokens and not (output and output[-1] in stop_token_ids):
        output.append(next_token(last, sample_index))
        last = (output[-1], checksum(last[1], output[-1]))
    return output


@dataclass(slots=True)
class Seat:
    """A worker's state of a sequence."""

    position: int
    block_table: list[int]
    token_ids: list[int]  # known, from `position` on
    sample_index: int  # in its group
    is_beam: bool


@dataclass(slots=True)
class EncodedStep:
    """A plan as it was when it was made, in the terms of the wire."""

    step_id: int
    snapshot: bool
    whole: dict[int, Seat]
    append_pairs: list[int]
    freed_seats: list[int]
    rows: list[int]
    num_tokens: list[int]
    positions: list[int]
    samples: list[tuple[int, int]]  # (row, seat)
    candidate_rows: list[int]
    copies: list[int]
    swap_out: list[int]
    placed: list[int]
    swap_in: list[int]
    num_spare_positions: int
    contexts: list[list[int] | None]  # for the checks alone: known tokens of the row, None where some are not


def encode(plan: StepPlan) -> EncodedStep:
    position_of = dict(zip(plan.sequences, plan.positions, strict=True))
    whole = {}
    for sequence in plan.whole:
        assert sequence.seat is not None and sequence.seat not in whole
        position = position_of.get(sequence, sequence.num_computed_tokens)
        token_ids = sequence.token_ids[position:]
        is_sampled = sequence in plan.sampled_sequences and sequence not in position_of
        is_beam = sequence.group.awaits_host
        assert token_ids or is_sampled or is_beam, "a seat described whole has a token to go on from, or gets it now"
        sample_index = sequence.group.sequences.index(sequence)
        whole[sequence.seat] = Seat(position, list(sequence.block_table), token_ids, sample_index, is_beam)
    ends = [position + n for position, n in zip(plan.positions, plan.num_tokens, strict=True)]
    return EncodedStep(
        step_id=plan.step_id,
        snapshot=plan.snapshot,
        whole=whole,
        append_pairs=list(plan.append_pairs),
        freed_seats=list(plan.freed_seats),
        rows=[sequence.seat for sequence in plan.sequences if sequence.seat is not None],
        num_tokens=list(plan.num_tokens),
        positions=list(plan.positions),
        samples=[
            (row, sequence.seat)
            for row, sequence in zip(plan.sampled_rows, plan.sampled_sequences, strict=True)
            if sequence.seat is not None
        ],
        candidate_rows=list(plan.candidate_rows),
        copies=list(plan.copies),
        swap_out=list(plan.swap_out),
        placed=list(plan.placed),
        swap_in=list(plan.swap_in),
        num_spare_positions=plan.num_spare_positions,
        contexts=[
            s.token_ids[:end] if end <= len(s.token_ids) else None for s, end in zip(plan.sequences, ends, strict=True)
        ],
    )


class FakeWorker:
    """Executes encoded steps in order, and asserts that each makes sense to it."""

    def __init__(self, num_blocks: int, block_size: int, num_seats: int, num_host_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_seats = num_seats
        self.seats: dict[int, Seat] = {}
        self.most_forced = 0  # tokens that a row computes beside its own, as if a grammar forced them
        self.forced: dict[int, list[int]] = {}  # by sample of the last step executed
        self.fetches = FetchedKv(block_size)
        self.num_computed_tokens = 0
        self.num_copies = 0
        self.last_of_candidates: list[KV] = []  # beside the candidate rows of the last step executed
        self._kv: list[KV | None] = [None] * (num_blocks * block_size)
        self._host_kv: list[KV | None] = [None] * (num_host_blocks * block_size)
        self._last_step_id: int | None = None

    def execute(self, step: EncodedStep) -> list[int]:
        """The sampled tokens, one for each sample."""
        self._update_seats(step)
        _move(step.swap_out, self._kv, self._host_kv, self.block_size)
        self.fetches.place(step.placed, self._kv)
        _move(step.swap_in, self._host_kv, self._kv, self.block_size)
        self._copy(step.copies)
        assert len(step.rows) == len(set(step.rows)) == len(step.positions) > 0
        self._check_single_writers(step)
        last = [self._compute(step, row) for row in range(len(step.rows))]
        self.forced = {}
        sampled = []
        assert len({seat_id for _, seat_id in step.samples}) == len(step.samples)
        for sample, (row, seat_id) in enumerate(step.samples):
            seat = self.seats[seat_id]
            assert not self.seats[step.rows[row]].token_ids or seat_id != step.rows[row]
            assert not seat.token_ids, "a seat samples at the end of its tokens only"
            num_skipped = seat.position - step.positions[row] - step.num_tokens[row]
            assert num_skipped == 0 or (self.most_forced and num_skipped > 0), "only forced tokens move a seat ahead"
            if step.num_tokens[row] == 1 and [seat_id] == [own for other, own in step.samples if other == row]:
                last[row] = self._force(step, sample, seat, last[row])
            seat.token_ids = [next_token(last[row], seat.sample_index)]
            sampled.append(seat.token_ids[0])
        for row in step.candidate_rows:
            seat = self.seats[step.rows[row]]
            assert seat.is_beam and not seat.token_ids
        self.last_of_candidates = [last[row] for row in step.candidate_rows]
        return sampled

    def _force(self, step: EncodedStep, sample: int, seat: Seat, last: KV) -> KV:
        """Compute some of the next tokens at once, as far as the seat's blocks allow. Returns the last."""
        room = len(seat.block_table) * self.block_size - seat.position - step.num_spare_positions
        for _ in range(min(last[1] % (self.most_forced + 1), room)):
            token_id = next_token(last, seat.sample_index)
            last = (token_id, checksum(last[1], token_id))
            self._kv[self._address(seat.block_table, seat.position)] = last
            seat.position += 1
            self.num_computed_tokens += 1
            self.forced.setdefault(sample, []).append(token_id)
        return last

    def scramble(self, step: EncodedStep) -> None:
        """The step fails in the middle: what it would have written is garbage, the seats are in disorder."""
        self._update_seats(step)
        self.fetches.scramble(step.placed, self._kv)
        for seat_id, n in zip(step.rows, step.num_tokens, strict=True):
            table, position = self.seats[seat_id].block_table, self.seats[seat_id].position
            for p in range(position, position + n):
                self._kv[self._address(table, p)] = None
            self.seats[seat_id].position = position + n
        self._last_step_id = step.step_id

    def block_kv(self, block: int) -> list[KV | None]:
        return self._kv[block * self.block_size : (block + 1) * self.block_size]

    def _update_seats(self, step: EncodedStep) -> None:
        if step.snapshot:
            self.seats.clear()
            assert not step.freed_seats and not step.append_pairs
        else:
            assert self._last_step_id is not None and step.step_id == self._last_step_id + 1
        self._last_step_id = step.step_id
        for seat_id in step.freed_seats:
            del self.seats[seat_id]
        for seat_id, seat in step.whole.items():
            assert 0 <= seat_id < self.num_seats
            assert seat_id not in self.seats or (seat.is_beam and self.seats[seat_id].is_beam)
            self.seats[seat_id] = seat
        pairs = step.append_pairs
        for seat_id, block in zip(pairs[::2], pairs[1::2], strict=True):
            assert seat_id not in step.whole
            self.seats[seat_id].block_table.append(block)

    def _copy(self, pairs: list[int]) -> None:
        """Copy all pairs at once, like a device: no block is both source and destination, none twice a destination."""
        sources, destinations = pairs[::2], pairs[1::2]
        assert len(set(destinations)) == len(destinations) and not set(sources) & set(destinations)
        _move(pairs, self._kv, self._kv, self.block_size)
        self.num_copies += len(sources)

    def _check_single_writers(self, step: EncodedStep) -> None:
        writer_of: dict[int, int] = {}
        for seat_id, num_tokens in zip(step.rows, step.num_tokens, strict=True):
            position = self.seats[seat_id].position
            for p in range(position, position + num_tokens):
                block = self.seats[seat_id].block_table[p // self.block_size]
                assert writer_of.setdefault(block, seat_id) == seat_id, "two rows write one block"

    def _compute(self, step: EncodedStep, row: int) -> KV:
        """Write the KV of a row's tokens, read its context back, return the last."""
        seat, num_tokens = self.seats[step.rows[row]], step.num_tokens[row]
        assert seat.position == step.positions[row] or (self.most_forced and seat.position > step.positions[row])
        assert 1 <= num_tokens <= len(seat.token_ids)
        previous = self._read(seat, seat.position)
        value = previous[-1][1] if previous else 0
        for token_id in seat.token_ids[:num_tokens]:
            value = checksum(value, token_id)
            self._kv[self._address(seat.block_table, seat.position)] = (token_id, value)
            seat.position += 1
        del seat.token_ids[:num_tokens]
        self.num_computed_tokens += num_tokens
        context = self._read(seat, seat.position)
        expected = step.contexts[row]
        known = [token_id for token_id, _ in context] if expected is None else expected
        assert context == context_kv(known), "the block table does not lead to the sequence's own tokens"
        return context[-1]

    def _read(self, seat: Seat, num_tokens: int) -> list[KV]:
        kv = [self._kv[self._address(seat.block_table, position)] for position in range(num_tokens)]
        assert None not in kv, "a block was read before it was written"
        return [value for value in kv if value is not None]

    def _address(self, block_table: list[int], position: int) -> int:
        block = block_table[position // self.block_size]
        assert 0 <= block < self.num_blocks
        return block * self.block_size + position % self.block_size


def _move(pairs: list[int], sources: list[KV | None], destinations: list[KV | None], block_size: int) -> None:
    """Copy whole blocks, flat pairs (source, destination)."""
    assert len(set(pairs[1::2])) == len(pairs[1::2])
    for source, destination in zip(pairs[::2], pairs[1::2], strict=True):
        start, end = destination * block_size, (destination + 1) * block_size
        assert 0 <= source * block_size < len(sources) and 0 <= start < len(destinations)
        destinations[start:end] = sources[source * block_size : (source + 1) * block_size]
