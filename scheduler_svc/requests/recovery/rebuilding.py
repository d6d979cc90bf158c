"""Rebuilding of a live request from the journal: its tokens, text, ends of samples, beams, and released output.

Text, stop strings and searches are functions of the journaled tokens and steps, so a replay restores their state.
Decides nothing: only events in the journal have happened.
"""

import time
from typing import NoReturn

from common.arrays import unpack_int32
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.live.live_request import FINISH_REASON_OF_STATE, LiveRequest, RequestTimes
from scheduler_svc.requests.live.live_sample import LiveSample
from scheduler_svc.requests.live.new_request import new_live_request
from scheduler_svc.requests.params.request_params import settle
from scheduler_svc.requests.params.served_model import ServedModel
from scheduler_svc.requests.recovery.journal_replay import JournaledRequest, JournaledSample


def rebuild_request(journaled: JournaledRequest, model: ServedModel) -> LiveRequest:
    """Rebuild a request as of the journal's last entry, with its end if it has ended there.

    Its whole output is released, since it is durable. Raises ValueError if its entries do not fit
    together.
    """
    request = _without_output(journaled, model)
    request.stream.prompt_logprobs = journaled.prompt_logprobs
    request.are_prompt_logprobs_settled = request.durable.has_prompt_logprobs = bool(journaled.prompt_logprobs)
    request.group.num_preemptions = journaled.num_preemptions
    request.num_settled_preemptions = request.durable.num_preemptions = journaled.num_preemptions
    request.durable.beam_steps += journaled.beam_steps
    request.durable.is_paused = journaled.is_paused
    request.replaces_record = journaled.replaces_record
    if request.beams is not None:
        for step in journaled.beam_steps:
            request.beams.replay(step)
        request.beams.assign_beams(request.group)
        if request.beams.num_steps and request.beams.is_done and journaled.finish is None:
            raise ValueError("its beam search is over, and it has no end")
        request.samples[0].pending_logprobs += tuple(request.beams.common_logprobs(0))
    else:
        for sample, kept in zip(request.samples, journaled.samples, strict=True):
            _give_output(sample, kept)
    if journaled.finish is not None:
        _decide_end(request, journaled)
    for sample in request.samples:
        _settle(sample)
    if journaled.finish is not None:
        request.stream.samples.extend(request.choose_samples()[len(request.stream.samples) :])
        if journaled.finish.HasField("outcome"):
            request.outcome = journaled.finish.outcome
        request.stream.close(request.outcome or request.settle_outcome())
    return request


def arrival_times(arrived_unix_ns: int) -> RequestTimes:
    """Times of a request that arrived in an earlier process: its arrival by our clock; the others are unknown."""
    age_ns = max(0, time.time_ns() - arrived_unix_ns)  # the time of day may have been set back
    arrived_ns = time.monotonic_ns() - age_ns
    return RequestTimes(arrived_ns=arrived_ns, arrived_unix_ns=arrived_unix_ns, accepted_ns=arrived_ns)


def _without_output(journaled: JournaledRequest, model: ServedModel) -> LiveRequest:
    admission = journaled.admission
    params = settle(admission.request, model.limits, draw_seed=_never, make_id=_never)
    if params.max_tokens is None:
        raise ValueError("its admission has no max_tokens")
    deadline_s = None
    if admission.HasField("deadline_unix_ns"):
        deadline_s = time.monotonic() + (admission.deadline_unix_ns - time.time_ns()) / 1e9
    request = new_live_request(
        params,
        unpack_int32(admission.prompt_token_ids).tolist(),
        digest=admission.request_digest,
        seq_id=journaled.number,
        max_tokens=params.max_tokens,
        deadline_s=deadline_s,
        tokenizer=model.tokenizer,
        wanted=admission.request.output,
        times=arrival_times(admission.arrived_unix_ns),
    )
    request.admission = admission
    return request


def _give_output(sample: LiveSample, kept: JournaledSample) -> None:
    assert sample.sequence is not None
    if kept.finish is None and len(kept.token_ids) >= sample.sequence.max_tokens:
        raise ValueError("a sample has all its tokens, and no end")
    sample.token_ids.extend(kept.token_ids)
    sample.pending_logprobs += tuple(kept.logprobs)
    sample.finish = kept.finish


def _decide_end(request: LiveRequest, journaled: JournaledRequest) -> None:
    finish = journaled.finish
    assert finish is not None
    request.ended_state, request.error = finish.state, finish.error
    times = request.times
    times.finished_ns = times.arrived_ns + finish.finished_unix_ns - times.arrived_unix_ns
    reason = FINISH_REASON_OF_STATE.get(finish.state)
    if request.beams is not None:
        request.make_hypotheses_samples(None if reason is None else pb.SampleFinish(reason=reason))
        return
    for sample in request.samples:
        if sample.finish is None:
            if reason is None:
                raise ValueError("it is finished, but one of its samples has no end")
            sample.finish = pb.SampleFinish(reason=reason, sample_index=sample.sample_index)


def _settle(sample: LiveSample) -> None:
    """Make the text of a sample, and release it."""
    stop = sample.push_text()
    if stop is not None and sample.finish is None:
        raise ValueError("a sample has its stop string, and no end")
    sample.settle_tokens()
    sample.settle_logprobs()
    sample.stream.num_released = sample.num_durable = len(sample.stream.token_ids)
    if sample.finish is not None:
        sample.is_end_settled = sample.is_end_durable = True
        sample.stream.close(sample.finish)


def _never() -> NoReturn:
    raise ValueError("its admission leaves something open")
