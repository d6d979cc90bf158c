"""Step for the wire, built from a plan of the scheduler.

Adds what the pure core does not know: the epoch, and each sequence's sampling parameters.
"""

from array import array
from collections.abc import Mapping

from common.sampling_params import SequenceSampling
from common.step import SequenceState, Step
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepPlan, seat_of


def build_step(plan: StepPlan, epoch: int, sampling_of: Mapping[int, SequenceSampling]) -> Step:
    """Build a step. Call it right after the plan was made: it reads the scheduler's sequences.

    Args:
        plan: of the scheduler.
        epoch: the scheduler's.
        sampling_of: sampling parameters by `seq_id`.
    """
    whole: list[SequenceState] = []
    if plan.whole:
        positions = {sequence.seq_id: plan.positions[row] for row, sequence in enumerate(plan.sequences)}
        prompts: dict[SequenceGroup, array[int]] = {}
        whole = [
            _seat_state(
                sequence,
                positions.get(sequence.seq_id, sequence.num_computed_tokens),
                sampling_of[sequence.seq_id],
                prompts,
            )
            for sequence in plan.whole
        ]
    samples: list[int] | None = None
    if plan.sampled_sequences != plan.sequences:  # rows that feed no sample, or several
        pairs = zip(plan.sampled_rows, plan.sampled_sequences, strict=True)
        samples = [number for row, sequence in pairs for number in (row, seat_of(sequence))]
    candidates = [n for row in plan.candidate_rows for n in (row, plan.sequences[row].group.num_candidates)]
    all_single = len(plan.num_tokens) == sum(plan.num_tokens)
    return Step(
        epoch=epoch,
        step_id=plan.step_id,
        snapshot=plan.snapshot,
        freed_seats=plan.freed_seats,
        whole=whole,
        append_pairs=plan.append_pairs,
        swap_out=plan.swap_out,
        placed=plan.placed,
        swap_in=plan.swap_in,
        copies=plan.copies,
        rows=plan.seats,
        num_tokens=() if all_single else plan.num_tokens,
        samples=samples,
        candidates=candidates,
        num_spare_positions=plan.num_spare_positions,
    )


def _seat_state(
    sequence: Sequence, position: int, sampling: SequenceSampling, prompts: "dict[SequenceGroup, array[int]]"
) -> SequenceState:
    return SequenceState(
        seat=seat_of(sequence),
        position=position,
        block_table=sequence.block_table,
        token_ids=sequence.token_ids[position:],
        history=_history(sequence, position, prompts) if sampling.needs_history else (),
        num_prompt_tokens=sequence.num_prompt_tokens,
        sampling=sampling,
    )


def _history(sequence: Sequence, position: int, prompts: "dict[SequenceGroup, array[int]]") -> "array[int]":
    """Tokens before a position. Members of a group share their prompt, of which numbers are made once for all.

    prompts: of the groups of this step so far
    """
    num_prompt_tokens = sequence.num_prompt_tokens
    prompt = prompts.get(sequence.group)
    if prompt is None:
        prompt = prompts[sequence.group] = array("i", sequence.token_ids[:num_prompt_tokens])
    return prompt[:position] + array("i", sequence.token_ids[num_prompt_tokens:position])
