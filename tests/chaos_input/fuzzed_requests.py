"""Requests for `Generate` as a broken or hostile client would send them, from a seed."""

import random
from collections.abc import Iterator

from quire.v1 import inference_pb2 as pb
from tests.chaos_input.fuzzed_messages import damaged, fill


def fuzz(num_requests: int, seed: int) -> Iterator[bytes]:
    """Serialised requests, about a third of them with bytes changed, cut or put in."""
    rng = random.Random(seed)
    for _ in range(num_requests):
        request = pb.GenerateRequest()
        fill(request, rng)
        end_soon(request, rng)
        data = request.SerializeToString()
        yield damaged(data, rng) if rng.random() < 0.35 else data


def end_soon(request: pb.GenerateRequest, rng: random.Random) -> None:
    """Limit a request so that it ends soon, and asks for nothing that scripted workers do not compute."""
    if request.output.prompt_logprobs <= 20:  # what is refused stays
        request.output.ClearField("prompt_logprobs")
    if request.stopping.max_tokens > 8 or not request.stopping.HasField("max_tokens"):
        request.stopping.max_tokens = rng.randrange(1, 8)
