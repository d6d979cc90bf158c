"""Schedulers that answer each request at once, all in one process: what is left is the cost of those who call them.

    python -m benchmarks.services.stub_scheduler --shards 4

Each shard is a real gRPC server of its own port, which serves Topology with summaries of caches that change four times
a second, GetModel, and Session; an output is one token. Beside it stands an HTTP server that answers OpenAI's
completions alike. Logs its addresses.
"""

import argparse
import asyncio
import itertools
import json
import random
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import grpc
import uvloop

from common.rpc import Context, server_options
from quire.prompt_beginnings import pack_hashes
from quire.rpc import PUBLIC_MESSAGE_BYTES
from quire.v1 import cluster_pb2
from quire.v1 import inference_pb2 as pb

MODEL = "stub"
_HASHES = 2048  # in the summary of each shard
_CHANGING = 200  # of them at a time
_CHANGE_S = 0.25
_ANSWER = json.dumps(
    {
        "id": "cmpl-0",
        "object": "text_completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "text": "a", "finish_reason": "length", "logprobs": None}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
).encode()
_MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "stub"}]}).encode()


async def session(requests: AsyncIterator[pb.SessionRequest], context: Context) -> AsyncIterator[pb.SessionResponse]:
    """Accepts, answers and finishes each submission in one message."""
    async for request in requests:
        if request.HasField("submit"):
            yield _answer(request)


async def model(request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
    """A model with a tokenizer, so that text is accepted."""
    return pb.GetModelResponse(name=MODEL, max_model_len=1 << 20, vocab_size=100, eos_token_ids=[2], has_tokenizer=True)


def _answer(request: pb.SessionRequest) -> pb.SessionResponse:
    accepted = pb.Accepted(request_id=request.submit.request_id, max_tokens=1)
    finish = pb.SampleFinish(reason=pb.FINISH_REASON_LENGTH)
    chunk = pb.Chunk(token_ids=[5], num_tokens=1, text="a", finish=finish)
    finished = pb.Finished(state=pb.REQUEST_STATE_FINISHED, usage=pb.Usage(prompt_tokens=1, completion_tokens=1))
    events = (
        pb.SessionEvent(handle=request.handle, accepted=accepted),
        pb.SessionEvent(handle=request.handle, chunk=chunk),
        pb.SessionEvent(handle=request.handle, finished=finished),
    )
    return pb.SessionResponse(events=events)


class StubTopology:
    """Says the same shards for ever, and summaries of which a tenth changes each time."""

    def __init__(self) -> None:
        self.addresses: list[str] = []  # of the shards

    async def follow(
        self, request: cluster_pb2.TopologyRequest, context: Context
    ) -> AsyncIterator[cluster_pb2.TopologyResponse]:
        """Messages of a Topology stream."""
        draw = random.Random(1)
        shards = [
            cluster_pb2.Shard(number=number, leader=address, epoch=1, num_workers=1)
            for number, address in enumerate(self.addresses)
        ]
        if len(shards) == 1:
            yield cluster_pb2.TopologyResponse(shards=shards)
            return
        hashes = [[draw.getrandbits(32) for _ in range(_HASHES)] for _ in shards]
        for version in itertools.count(1):
            for each in hashes:
                each[:_CHANGING] = [draw.getrandbits(32) for _ in range(_CHANGING)]
            cached = [
                cluster_pb2.CachedBeginnings(shard=shard, version=version, hashes=pack_hashes(set(each)))
                for shard, each in enumerate(hashes)
            ]
            yield cluster_pb2.TopologyResponse(shards=shards, cached=cached)
            await asyncio.sleep(_CHANGE_S)


def handlers(topology: StubTopology) -> list[grpc.GenericRpcHandler]:
    """Handlers of the methods that a client calls on its way to an output."""
    inference: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Session": grpc.stream_stream_rpc_method_handler(
            session, pb.SessionRequest.FromString, pb.SessionResponse.SerializeToString
        ),
        "GetModel": grpc.unary_unary_rpc_method_handler(
            model, pb.GetModelRequest.FromString, pb.GetModelResponse.SerializeToString
        ),
    }
    cluster: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Topology": grpc.unary_stream_rpc_method_handler(
            topology.follow, cluster_pb2.TopologyRequest.FromString, cluster_pb2.TopologyResponse.SerializeToString
        )
    }
    return [
        grpc.method_handlers_generic_handler(f"quire.v1.{service}", methods)
        for service, methods in (("Inference", inference), ("Cluster", cluster))
    ]


class StubHttp(asyncio.Protocol):
    """One connection of the HTTP server: answers each POST like a completion, and each GET as healthy."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._buffer = bytearray()
        self._num_wanted = 0  # bytes of the request that has begun

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= max(1, self._num_wanted) and self._take_request():
            pass

    def _take_request(self) -> bool:
        """Answer the first request in the buffer. False: it is not whole yet."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._buffer[:end]).lower()
        _, _, length = head.partition(b"content-length:")
        self._num_wanted = end + 4 + (int(length.split(b"\r\n")[0]) if length else 0)
        if len(self._buffer) < self._num_wanted:
            return False
        if b"expect: 100-continue" in head:
            raise ValueError("a client asks before it sends")
        del self._buffer[: self._num_wanted]
        self._num_wanted = 0
        answer = _ANSWER if head.startswith(b"post") else _MODELS
        assert self._transport is not None
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer)
        )
        return True


async def serve(num_shards: int) -> None:
    """Serve until told to end."""
    topology = StubTopology()
    servers = []
    for _ in range(num_shards):
        server = grpc.aio.server(options=server_options(PUBLIC_MESSAGE_BYTES))
        server.add_generic_rpc_handlers(tuple(handlers(topology)))
        topology.addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        servers.append(server)
    loop = asyncio.get_running_loop()
    listening = [await loop.create_server(StubHttp, "127.0.0.1", 0) for _ in range(num_shards)]
    ports = [each.sockets[0].getsockname()[1] for each in listening]
    log = {"event": "listening", "addresses": topology.addresses, "http_ports": ports}
    print(json.dumps(log), file=sys.stderr, flush=True)
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await asyncio.gather(*(server.stop(0) for server in servers))


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `python -m benchmarks.services.stub_scheduler`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=4)
    uvloop.run(serve(parser.parse_args(arguments).shards))


if __name__ == "__main__":
    main()
