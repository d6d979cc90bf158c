"""Live requests made from what a client says, without engine, journal or worker."""

from typing import Any

from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.live.live_request import LiveRequest, RequestTimes
from scheduler_svc.requests.live.live_sample import LiveSample
from scheduler_svc.requests.live.new_request import new_live_request
from scheduler_svc.text.tokenizer import ModelTokenizer
from tests.scheduler.request_settling import request_of, settled

SEQ_ID = 40  # of the first sequence
ARRIVED_NS, ARRIVED_UNIX_NS = 5_000, 1_000_000
MAX_TOKENS = 9
PROMPT = [11, 12, 13]


def live(
    request: pb.GenerateRequest | None = None, prompt: list[int] | None = None, tokenizer: ModelTokenizer | None = None
) -> LiveRequest:
    """A request that has just been prepared."""
    request = request or request_of()
    return new_live_request(
        settled(request),
        list(PROMPT if prompt is None else prompt),
        digest=b"digest",
        seq_id=SEQ_ID,
        max_tokens=MAX_TOKENS,
        deadline_s=None,
        tokenizer=tokenizer,
        wanted=request.output,
        times=RequestTimes(arrived_ns=ARRIVED_NS, arrived_unix_ns=ARRIVED_UNIX_NS),
    )


def drawing(n: int, **sampling: Any) -> pb.GenerateRequest:
    """Build a request for `n` samples."""
    return request_of(sampling=pb.SamplingParams(n=n, **sampling))


def logprob_of(token_id: int, logprob: float = -1.0) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(token_id=token_id, logprob=logprob)


def settle(sample: LiveSample, *token_ids: int, logprobs: list[float] | None = None) -> None:
    """New tokens that are settled."""
    sample.token_ids.extend(token_ids)
    if logprobs is not None:
        sample.pending_logprobs += tuple(map(logprob_of, token_ids, logprobs))
    sample.push_text()
    sample.settle_tokens()
    sample.settle_logprobs()
