"""A worker that has blocks and slots but no model: KV of a token is the token and a checksum of all up to it.

It obeys plans as a real worker does, knows of a sequence only what plans say, and reads contexts through block tables.
"""

import struct
import zlib
from dataclasses import dataclass

from scheduler_svc.core.step_plan import StepPlan

VOCAB_SIZE = 17
STOP_TOKEN_ID = 0
KV = tuple[int, int]  # (token id, checksum of the context up to it)


def checksum(previous: int, token_id: int) -> int:
    return zlib.crc32(struct.pack("<i", token_id), previous)


def context_kv(token_ids: list[int]) -> list[KV]:
    """What the cache must hold for these tokens."""
    kv = []
    value = 0
    for token_id in token_ids:
        value = checksum(value, token_id)
        kv.append((token_id, value))
    return kv


def next_token(last: KV) -> int:
    """The model: a pure function of the whole context."""
    return last[1] % VOCAB_SIZE


def unconstrained_output(prompt: list[int], max_tokens: int, stop_token_ids: frozenset[int]) -> list[int]:
    """What the model says when nothing stands in its way."""
    output: list[int] = []
    last = context_kv(prompt)[-1]
    while len(output) < max_tokens and not (output and output[-1] in stop_token_ids):
        output.append(next_token(last))
        last = (output[-1], checksum(last[1], output[-1]))
    return output


@dataclass(slots=True)
class Slot:
    """A worker's state of a sequence."""

    position: int
    block_table: list[int]
    token_ids: list[int]  # known, from `position` on


@dataclass(slots=True)
class EncodedStep:
    """A plan as it was when it was made, in the terms of the wire."""

    step_id: int
    snapshot: bool
    whole: dict[int, Slot]
    append_pairs: list[int]
    freed_slots: list[int]
    rows: list[int]
    num_tokens: list[int]
    positions: list[int]
    sampled_rows: list[int]
    contexts: list[list[int] | None]  # for the checks alone: known tokens of the row, None where some are not


def encode(plan: StepPlan) -> EncodedStep:
    position_of = dict(zip(plan.sequences, plan.positions, strict=True))
    whole = {}
    for sequence in plan.whole:
        assert sequence.slot is not None and sequence.slot not in whole
        position = position_of.get(sequence, sequence.num_computed_tokens)
        token_ids = sequence.token_ids[position:]
        assert token_ids, "a slot described whole has a known token to go on from"
        whole[sequence.slot] = Slot(position, list(sequence.block_table), token_ids)
    ends = [position + n for position, n in zip(plan.positions, plan.num_tokens, strict=True)]
    return EncodedStep(
        step_id=plan.step_id,
        snapshot=plan.snapshot,
        whole=whole,
        append_pairs=list(plan.append_pairs),
        freed_slots=list(plan.freed_slots),
        rows=[sequence.slot for sequence in plan.sequences if sequence.slot is not None],
        num_tokens=list(plan.num_tokens),
        positions=list(plan.positions),
        sampled_rows=list(plan.sampled_rows),
        contexts=[
            s.token_ids[:end] if end <= len(s.token_ids) else None for s, end in zip(plan.sequences, ends, strict=True)
        ],
    )


class FakeWorker:
    """Executes encoded steps in order, and asserts that each makes sense to it."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_slots = num_slots
        self.slots: dict[int, Slot] = {}
        self.num_computed_tokens = 0
        self._kv: list[KV | None] = [None] * (num_blocks * block_size)
        self._last_step_id: int | None = None

    def execute(self, step: EncodedStep) -> list[int]:
        """The sampled tokens, one for each sampled row."""
        self._update_slots(step)
        assert len(step.rows) == len(set(step.rows)) == len(step.positions) > 0
        last = [self._compute(step, row) for row in range(len(step.rows))]
        sampled = []
        for row in step.sampled_rows:
            slot = self.slots[step.rows[row]]
            assert not slot.token_ids, "a row samples at the end of its tokens only"
            slot.token_ids = [next_token(last[row])]
            sampled.append(slot.token_ids[0])
        return sampled

    def scramble(self, step: EncodedStep) -> None:
        """The step fails in the middle: what it would have written is garbage, the slots are in disorder."""
        self._update_slots(step)
        for slot_id, n, position in zip(step.rows, step.num_tokens, step.positions, strict=True):
            table = self.slots[slot_id].block_table
            for p in range(position, position + n):
                self._kv[self._address(table, p)] = None
            self.slots[slot_id].position = position + n
        self._last_step_id = step.step_id

    def _update_slots(self, step: EncodedStep) -> None:
        if step.snapshot:
            self.slots.clear()
            assert not step.freed_slots and not step.append_pairs
        else:
            assert self._last_step_id is not None and step.step_id == self._last_step_id + 1
        self._last_step_id = step.step_id
        for slot_id in step.freed_slots:
            del self.slots[slot_id]
        for slot_id, slot in step.whole.items():
            assert 0 <= slot_id < self.num_slots and slot_id not in self.slots
            self.slots[slot_id] = slot
        pairs = step.append_pairs
        for slot_id, block in zip(pairs[::2], pairs[1::2], strict=True):
            assert slot_id not in step.whole
            self.slots[slot_id].block_table.append(block)

    def _compute(self, step: EncodedStep, row: int) -> KV:
        """Write the KV of a row's tokens, read its context back, return the last."""
        slot, num_tokens = self.slots[step.rows[row]], step.num_tokens[row]
        assert slot.position == step.positions[row] and 1 <= num_tokens <= len(slot.token_ids)
        previous = self._read(slot, slot.position)
        value = previous[-1][1] if previous else 0
        for token_id in slot.token_ids[:num_tokens]:
            value = checksum(value, token_id)
            self._kv[self._address(slot.block_table, slot.position)] = (token_id, value)
            slot.position += 1
        del slot.token_ids[:num_tokens]
        self.num_computed_tokens += num_tokens
        context = self._read(slot, slot.position)
        expected = step.contexts[row]
        known = [token_id for token_id, _ in context] if expected is None else expected
        assert context == context_kv(known), "the block table does not lead to the sequence's own tokens"
        return context[-1]

    def _read(self, slot: Slot, num_tokens: int) -> list[KV]:
        kv = [self._kv[self._address(slot.block_table, position)] for position in range(num_tokens)]
        assert None not in kv, "a block was read before it was written"
        return [value for value in kv if value is not None]

    def _address(self, block_table: list[int], position: int) -> int:
        block = block_table[position // self.block_size]
        assert 0 <= block < self.num_blocks
        return block * self.block_size + position % self.block_size
