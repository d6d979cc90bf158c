"""Bad input against live processes (F21 to F23): whether the server lives, grows, or lets others wait.

    python -m tests.chaos_input.hostile

starts the demo model and prints what it saw: fuzzed requests, then giants, beside a client that goes on streaming.
"""

import argparse
import asyncio
import json
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import grpc

import quire
from quire.rpc import PUBLIC_MESSAGE_BYTES, channel_options
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc
from tests.chaos_input.exhaustion import rss_bytes
from tests.chaos_input.fuzzed_requests import fuzz
from tests.chaos_input.overload import demo_services
from tests.services import Service

_MEGABYTES = 1024 * 1024
_NUM_WARM = 1000
_NUM_GIANT_ROUNDS = 5
_AT_ONCE = 8
_REFUSALS = {  # a timeout of 1 ms is a valid one, and so is a request_id that another one has
    "OK",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "ALREADY_EXISTS",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileReport:
    """Report of the attack; times in seconds."""

    num_fuzzed: int
    answers: dict[str, int]  # by status code
    unexpected: dict[str, int]  # those of them that no bad request should get
    giant_refusal_s: dict[str, float]
    calm_stall_s: float  # longest between two tokens of another client, before
    fuzz_stall_s: float  # during the fuzzed requests
    giant_stall_s: float  # during the giants
    fuzz_rss_growth: float  # of the scheduler, after the first thousand
    giant_rss_growth: float  # and with giants of which as many came before
    alive: bool


async def be_hostile(service: Service, address: str, *, num_fuzzed: int = 10_000, seed: int = 0) -> HostileReport:
    """Sends all of it to a scheduler that serves the demo model."""
    async with quire.AsyncClient(address) as client, grpc.aio.insecure_channel(address) as channel:
        calm_s, _ = await _beside(client, asyncio.sleep(2))
        answers = await _send_fuzzed(channel, _NUM_WARM, seed)
        rss = rss_bytes(service.process.pid)
        fuzz_s, more = await _beside(client, _send_fuzzed(channel, num_fuzzed - _NUM_WARM, seed + 1))
        fuzz_growth = rss_bytes(service.process.pid) / rss - 1
        for _ in range(_NUM_GIANT_ROUNDS):
            await _send_giants(address)
        rss = rss_bytes(service.process.pid)
        for _ in range(_NUM_GIANT_ROUNDS - 1):
            await _send_giants(address)
        giant_s, refusals_s = await _beside(client, _send_giants(address))
        giant_growth = rss_bytes(service.process.pid) / rss - 1
    answers += more
    return HostileReport(
        num_fuzzed=num_fuzzed,
        answers=dict(answers),
        unexpected={code: count for code, count in answers.items() if code not in _REFUSALS},
        giant_refusal_s=refusals_s,
        calm_stall_s=calm_s,
        fuzz_stall_s=fuzz_s,
        giant_stall_s=giant_s,
        fuzz_rss_growth=fuzz_growth,
        giant_rss_growth=giant_growth,
        alive=service.process.poll() is None,
    )


async def _beside(client: quire.AsyncClient, work: Any) -> tuple[float, Any]:
    """Do the work beside another client's streams; return their longest time between two tokens, and the result."""
    clock = asyncio.get_running_loop().time
    stalls: list[float] = []

    async def stream() -> None:
        while True:
            last_s = None
            async with client.stream("The fox", max_tokens=100, ignore_eos=True, temperature=0) as chunks:
                async for _ in chunks:
                    now_s = clock()
                    if last_s is not None:
                        stalls.append(now_s - last_s)
                    last_s = now_s

    streaming = asyncio.create_task(stream())
    try:
        result = await work
    finally:
        streaming.cancel()
        with suppress(asyncio.CancelledError):
            await streaming
    return max(stalls, default=0.0), result


async def _send_fuzzed(channel: grpc.aio.Channel, num_requests: int, seed: int) -> Counter[str]:
    send: Any = channel.unary_stream("/quire.v1.Inference/Generate")
    answers: Counter[str] = Counter()
    waiting = fuzz(num_requests, seed)

    async def send_some() -> None:
        for data in waiting:
            call = send(data)
            with suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
            answers[(await call.code()).name] += 1

    await asyncio.gather(*(send_some() for _ in range(_AT_ONCE)))
    return answers


async def _send_giants(address: str) -> dict[str, float]:
    """Seconds until each was refused, sending and receiving included. Raises AssertionError for one that was not."""
    giants = {
        "text of 8 MB": pb.GenerateRequest(text="word " * (8 * _MEGABYTES // 5)),
        "text that just may be tokenised": pb.GenerateRequest(text="word " * (65_000 // 5)),
        "a million stop strings": pb.GenerateRequest(text="x", stopping=pb.StoppingParams(stop=["x"] * 1_000_000)),
        "100,000 chat messages": pb.GenerateRequest(
            chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")] * 100_000)
        ),
        "2 M token ids": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 2 * _MEGABYTES)),
        "above the message limit": pb.GenerateRequest(text="x" * (PUBLIC_MESSAGE_BYTES + 1)),
    }
    clock = asyncio.get_running_loop().time
    took_s = {}
    async with grpc.aio.insecure_channel(address, options=channel_options(4 * PUBLIC_MESSAGE_BYTES)) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        await stub.GetModel(pb.GetModelRequest())
        for name, request in giants.items():
            start_s = clock()
            try:
                async for _ in stub.Generate(request):
                    raise AssertionError(f"{name} was let in")
            except grpc.aio.AioRpcError as error:
                refusals = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
                assert error.code() in refusals, f"{name}: {error.code()}"
            took_s[name] = clock() - start_s
    return took_s


async def _main() -> None:
    parser = argparse.ArgumentParser(prog="hostile", description=__doc__)
    parser.add_argument("--num-fuzzed", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    async with demo_services() as (service, address):
        report = await be_hostile(service, address, num_fuzzed=arguments.num_fuzzed, seed=arguments.seed)
    print(json.dumps(asdict(report), indent=2))  # noqa: T201


if __name__ == "__main__":
    asyncio.run(_main())
