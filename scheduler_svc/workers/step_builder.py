"""A plan of the scheduler, as the step that goes over the wire.

Adds what the pure core does not know: the epoch, and each sequence's sampling parameters.
"""

from collections.abc import Mapping

from common.slot_sampling import SlotSampling
from common.step import SlotState, Step
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step_plan import StepPlan


def build_step(plan: StepPlan, epoch: int, sampling_of: Mapping[int, SlotSampling]) -> Step:
    """Encodes a plan; call it before anything else is asked of the scheduler, whose sequences it reads.

    Args:
        plan: what was decided.
        epoch: the scheduler's.
        sampling_of: sampling parameters by `seq_id`.
    """
    whole: list[SlotState] = []
    if plan.whole:
        positions = {sequence.seq_id: plan.positions[row] for row, sequence in enumerate(plan.sequences)}
        whole = [
            _slot_state(
                sequence,
                positions.get(sequence.seq_id, sequence.num_computed_tokens),
                sampling_of[sequence.seq_id],
            )
            for sequence in plan.whole
        ]
    rows = [sequence.slot for sequence in plan.sequences]
    samples: list[int] | None = None
    if len(plan.sampled_rows) != len(rows):
        samples = [number for row in plan.sampled_rows for number in (row, rows[row] or 0)]
    all_single = len(plan.num_tokens) == sum(plan.num_tokens)
    return Step(
        epoch=epoch,
        step_id=plan.step_id,
        snapshot=plan.snapshot,
        freed_slots=plan.freed_slots,
        whole=whole,
        append_pairs=plan.append_pairs,
        copies=plan.copies,
        rows=[slot for slot in rows if slot is not None],
        num_tokens=() if all_single else plan.num_tokens,
        samples=samples,
    )


def _slot_state(sequence: Sequence, position: int, sampling: SlotSampling) -> SlotState:
    assert sequence.slot is not None, "a scheduled sequence has a slot"
    return SlotState(
        slot=sequence.slot,
        position=position,
        block_table=sequence.block_table,
        token_ids=sequence.token_ids[position:],
        history=sequence.token_ids[:position] if sampling.needs_history else (),
        num_prompt_tokens=sequence.num_prompt_tokens,
        sampling=sampling,
    )
