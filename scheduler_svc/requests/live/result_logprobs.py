"""Log-probabilities of a step's result, given to the samples and requests that asked for them.

Decides nothing about tokens; the result was checked before.
"""

from collections.abc import Collection, Mapping

from common.step import StepResult
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.requests.live.live_request import LiveRequest
from scheduler_svc.requests.live.live_sample import LiveSample
from scheduler_svc.requests.live.token_logprobs import token_logprobs


def store_logprobs(
    plan: StepPlan, result: StepResult, sample_of: Mapping[int, LiveSample], seq_ids: Collection[int]
) -> None:
    """Store the log-probabilities of sampled tokens, for the sequences in `seq_ids`, whose tokens count."""
    for index, rows in result.logprobs.items():
        seq_id = plan.sampled_sequences[index].seq_id
        if seq_id in seq_ids:
            sample_of[seq_id].pending_logprobs += tuple(token_logprobs([result.token_ids[index]], rows))


def store_prompt_logprobs(plan: StepPlan, result: StepResult, request_of: Mapping[SequenceGroup, LiveRequest]) -> None:
    """Store the log-probabilities of prompt tokens. Those computed again, on another worker or so, are known."""
    by_seat = dict(zip(plan.seats, plan.sequences, strict=True))
    for item in result.prompt_logprobs:
        sequence = by_seat.get(item.seat)
        request = request_of.get(sequence.group) if sequence is not None else None
        if sequence is None or request is None:
            continue
        kept = request.stream.prompt_logprobs
        num_known = len(kept) + 1 - item.position
        if num_known >= 0:
            tokens = sequence.token_ids[item.position : item.position + len(item.rows.logprobs)]
            request.stream.prompt_logprobs = (*kept, *token_logprobs(tokens, item.rows)[num_known:])
