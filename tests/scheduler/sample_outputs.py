"""Requests with several samples, and what a reader of one sees, put together and checked on the way.

Positions of each sample are consecutive, each sample has one finish and nothing behind it, `accepted` comes first and
`finished` last and once, behind the finishes of all samples.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc

from quire.v1 import inference_pb2 as pb
from tests.scheduler.serving_site import Site, counting


@dataclass(slots=True)
class SampleSeen:
    """One sample's output, as far as it came."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finish: pb.SampleFinish | None = None
    num_chunks: int = 0

    @property
    def reason(self) -> pb.FinishReason.ValueType:
        assert self.finish is not None, "it has not ended"
        return self.finish.reason


@dataclass(slots=True)
class RequestSeen:
    """One request's output. `error` is that of its call, if it had one."""

    accepted: pb.Accepted | None = None
    samples: list[SampleSeen] = field(default_factory=list)
    finished: pb.Finished | None = None
    error: grpc.aio.AioRpcError | None = None

    @property
    def token_ids(self) -> list[list[int]]:
        return [sample.token_ids for sample in self.samples]

    @property
    def reasons(self) -> list[pb.FinishReason.ValueType]:
        return [sample.reason for sample in self.samples]

    @property
    def end(self) -> pb.Finished:
        assert self.finished is not None, "it has not ended"
        return self.finished

    def add_chunk(self, chunk: pb.Chunk) -> None:
        """Takes one chunk; with token ids asked for."""
        assert self.finished is None, "output behind the end"
        self.samples += [SampleSeen() for _ in range(chunk.index + 1 - len(self.samples))]
        sample = self.samples[chunk.index]
        assert sample.finish is None, "output behind the finish of its sample"
        assert chunk.position == len(sample.token_ids), "positions are not consecutive"
        assert chunk.num_tokens == len(chunk.token_ids)
        assert chunk.num_tokens or chunk.HasField("finish"), "an empty chunk"
        sample.token_ids += chunk.token_ids
        sample.text += chunk.text
        sample.logprobs += chunk.logprobs
        sample.prompt_logprobs += chunk.prompt_logprobs
        sample.num_chunks += 1
        if chunk.HasField("finish"):
            sample.finish = chunk.finish

    def add_message(self, message: pb.GenerateResponse) -> None:
        """Takes one message of `Generate`."""
        kind = message.WhichOneof("event")
        assert (kind == "accepted") == (self.accepted is None)
        if kind == "accepted":
            self.accepted = message.accepted
        elif kind == "chunk":
            self.add_chunk(message.chunk)
        else:
            self.finish(message.finished)

    def finish(self, finished: pb.Finished) -> None:
        """Takes the end."""
        assert self.finished is None, "a second end"
        assert all(sample.finish is not None for sample in self.samples), "the end came before that of a sample"
        self.finished = finished


def seen_in(chunks: Iterable[pb.Chunk]) -> RequestSeen:
    """Collect the outcome from chunks alone."""
    seen = RequestSeen()
    for chunk in chunks:
        seen.add_chunk(chunk)
    return seen


async def see(site: Site, request: pb.GenerateRequest) -> RequestSeen:
    """Runs a request to its end, whatever that is."""
    seen = RequestSeen()
    try:
        async for message in site.inference.Generate(request):
            seen.add_message(message)
    except grpc.aio.AioRpcError as error:
        seen.error = error
    else:
        assert seen.end.state == pb.REQUEST_STATE_FINISHED
    return seen


async def record_of(site: Site, request_id: str) -> pb.GetRequestResponse:
    """Read the record as GetRequest shows it now."""
    return await site.inference.GetRequest(pb.GetRequestRequest(request_id=request_id))


def assert_recorded(record: pb.GetRequestResponse, seen: RequestSeen) -> None:
    """The record has what was seen, of all samples."""
    assert record.state == seen.end.state
    assert [list(sample.token_ids) for sample in record.samples] == seen.token_ids
    assert [sample.text for sample in record.samples] == [sample.text for sample in seen.samples]
    assert [sample.finish for sample in record.samples] == [sample.finish for sample in seen.samples]
    assert record.usage == seen.end.usage
    assert record.usage.completion_tokens == sum(len(each) for each in seen.token_ids)
    assert record.error == seen.end.error


def sampled(start: int, max_tokens: int, n: int, request_id: str = "", **sampling: Any) -> pb.GenerateRequest:
    """Sample i of its output is `scripted_model.counted` with i."""
    request = counting(start, max_tokens, request_id)
    request.sampling.CopyFrom(pb.SamplingParams(n=n, **sampling))
    return request


def num_released(site: Site, request_id: str) -> list[int]:
    """Tokens of each sample that readers may see."""
    return [sample.num_released for sample in site.engine.live[request_id].stream.samples]
