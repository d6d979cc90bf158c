"""Construction of a live request from validated parameters and a tokenised prompt: its sequences, samples and streams.

Admits nothing: admission has checked before that there is room.
"""

from quire.v1 import inference_pb2 as pb
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.requests.live.beam_decoding import BeamDecoding
from scheduler_svc.requests.live.live_request import LiveRequest, RequestTimes
from scheduler_svc.requests.live.live_sample import new_sample
from scheduler_svc.requests.live.output_stream import OutputStream
from scheduler_svc.requests.params.request_params import ValidatedParams
from scheduler_svc.text.tokenizer import ModelTokenizer


def new_live_request(
    params: ValidatedParams,
    token_ids: list[int],
    *,
    digest: bytes,
    seq_id: int,
    max_tokens: int,
    deadline_s: float | None,
    tokenizer: ModelTokenizer | None,
    wanted: pb.OutputParams,
    times: RequestTimes,
) -> LiveRequest:
    """New live request, without output.

    `token_ids` is its prompt, `max_tokens` the bound of its output in force, `deadline_s` by the monotonic clock;
    its sequences are numbered from `seq_id` on.
    """
    beams = BeamDecoding(params.beam_params(max_tokens)) if params.beam is not None else None
    sequences = _sequences(params, token_ids, seq_id, max_tokens)
    group = SequenceGroup(
        sequences,
        arrival=seq_id,  # the request's number, also once the group has no sequences
        priority=params.priority,
        deadline_s=deadline_s,
        owner=params.tenant,
        awaits_host=beams is not None,
        num_candidates=beams.num_candidates if beams else 0,
    )
    drawn_by = [None] if beams else sequences
    samples = [new_sample(params, token_ids, tokenizer, each, index) for index, each in enumerate(drawn_by)]
    if beams:
        samples[0].token_ids = beams.common_token_ids
    accepted = pb.Accepted(
        request_id=params.request_id,
        num_prompt_tokens=len(token_ids),
        max_tokens=max_tokens,
        seed=params.seed,
        num_samples=params.num_samples,
        in_reasoning=tokenizer is not None and tokenizer.opens_reasoning(token_ids),
        created_unix_ns=times.arrived_unix_ns,
    )
    visible = [] if params.is_ranked else [sample.stream for sample in samples]
    return LiveRequest(
        params=params,
        digest=digest,
        tokenizer=tokenizer,
        group=group,
        samples=samples,
        beams=beams,
        stream=OutputStream(accepted, wanted, visible),
        times=times,
    )


def _sequences(params: ValidatedParams, token_ids: list[int], seq_id: int, max_tokens: int) -> list[Sequence]:
    """Sequences of the request. Beams end by the decision of the search, other sequences by their own tokens."""
    ends: frozenset[int] = frozenset()
    if params.beam is None:  # where there is nothing to unite, the set is the one of all requests
        ends = params.stop_token_ids | params.eos_token_ids if params.stop_token_ids else params.eos_token_ids
    return [
        Sequence(
            seq_id=seq_id + index,
            token_ids=list(token_ids) if index else token_ids,
            num_prompt_tokens=len(token_ids),
            max_tokens=max_tokens,
            stop_token_ids=ends,
            min_tokens=params.min_tokens,
            hash_seed=prefix_hash_seed(params.tenant, params.cache_salt),
            use_prefix_cache=params.sampling.num_prompt_logprobs is None,
        )
        for index in range(params.num_sequences)
    ]


def prefix_hash_seed(tenant: str, cache_salt: str) -> bytes:
    """Root of the hash chains of a tenant's blocks."""
    return f"{len(tenant)}:{tenant}{cache_salt}".encode()
