"""Bad input against a scheduler that serves others meanwhile: bytes that are no messages, nonsense, and giants."""

import asyncio
import math
import random
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from quire.errors import ShardsChangedError
from quire.rpc import channel_options, error_of
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc
from tests.chaos.client_faults import NO_PROXY, resident_bytes
from tests.chaos.deployment import Deployment
from tests.chaos.scenario import NOTHING_LOST, Figures, Target, speed
from tests.chaos.stage import Scenario, Stage

NUM_RAW = 2000
MAX_REASONS = 10
NUM_NONSENSE = 3000
CONCURRENT = 16
CALL_TIMEOUT_S = 60.0
SERVICE = "/quire.v1.Inference/"
UNARY = ("GetRequest", "Cancel", "Tokenize", "Detokenize", "GetModel", "GetStats", "PinPrefix", "NoSuchMethod")
STREAMS = ("Generate",)
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


async def bytes_that_are_no_messages(stage: Stage) -> Figures:
    deployment, load = await stage.flowing()
    rng = random.Random(stage.seed)
    pid = deployment.scheduler.service.process.pid
    async with _channel(deployment) as channel:
        await _many(NUM_RAW // 4, lambda: _raw(channel, rng))  # what a first time takes is no growth
        rss_before = resident_bytes(pid)
        odd = await _many(NUM_RAW, lambda: _raw(channel, rng))
    await asyncio.to_thread(_talk_nonsense, deployment.address, rng)
    growth = resident_bytes(pid) / rss_before - 1
    await load.until_flowing()
    return _with_odd(await stage.figures(load, deployment, rss_growth=growth), deployment, odd)


async def requests_that_make_no_sense(stage: Stage) -> Figures:
    deployment, load = await stage.flowing()
    rng = random.Random(stage.seed)
    async with _channel(deployment) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        odd = await _many(NUM_NONSENSE, lambda: _nonsense(stub, rng))
    return _with_odd(await stage.figures(load, deployment), deployment, odd)


async def giants(stage: Stage) -> Figures:
    deployment, load = await stage.flowing()
    async with _channel(deployment) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        requests = {
            "ids_beyond_model_s": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 5000)),
            "text_of_8_mb_s": pb.GenerateRequest(text="once upon a time " * 500_000),
            "a_million_stops_s": pb.GenerateRequest(text="x", stopping=pb.StoppingParams(stop=["ab"] * 1_000_000)),
            "beyond_message_limit_s": pb.GenerateRequest(text="x" * (17 << 20)),
        }
        times: dict[str, float] = {}
        taken: list[str] = []
        for name, request in requests.items():
            began_s = time.monotonic()
            odd = await _not_refused(partial(_generate, stub, request))
            taken += [f"{name}: {odd}"] if odd is not None else []
            times[name] = time.monotonic() - began_s
    return _with_odd(await stage.figures(load, deployment, **times), deployment, taken)


def _with_odd(figures: Figures, deployment: Deployment, odd: list[str]) -> Figures:
    figures.more |= {"odd_answers": len(odd), "crashes": deployment.num_over}
    figures.reasons += odd[:MAX_REASONS]
    return figures


def _channel(deployment: Deployment) -> grpc.aio.Channel:
    options = [*channel_options(64 << 20), NO_PROXY]
    return grpc.aio.insecure_channel(deployment.address, options=options)


async def _many(number: int, attempt: Callable[[], Awaitable[str | None]]) -> list[str]:
    """Run attempts, some at once; return their unexpected answers."""
    room = asyncio.Semaphore(CONCURRENT)

    async def one() -> str | None:
        async with room:
            return await attempt()

    return [odd for odd in await asyncio.gather(*(one() for _ in range(number))) if odd is not None]


async def _raw(channel: grpc.aio.Channel, rng: random.Random) -> str | None:
    """Send random bytes, or a message with unknown fields or wrong types; return the fault of the answer."""
    raw: Any = channel  # whose methods take bytes as they are
    data = rng.choice([_noise, _unknown_fields, _wrong_types])(rng)
    if rng.random() < 0.3:
        call = raw.unary_stream(SERVICE + rng.choice(STREAMS))(data, timeout=CALL_TIMEOUT_S)
        return await _not_refused(lambda: _first(call))
    method = rng.choice(UNARY)
    try:
        await raw.unary_unary(SERVICE + method)(data, timeout=CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return None if _is_refusal(error) else f"{method}: {error.code()}: {error.details()}"
    return None  # what has only unknown fields is the empty message, which some methods take


def _noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randint(1, 400))


def _unknown_fields(rng: random.Random) -> bytes:
    return b"".join(bytes([0xFA, 0x7F, 5]) + rng.randbytes(5) for _ in range(rng.randint(1, 20)))


def _wrong_types(rng: random.Random) -> bytes:
    return bytes([rng.choice((0x08, 0x10, 0x18, 0x0D, 0x15))]) + rng.randbytes(rng.randint(1, 9))


async def _nonsense(stub: "inference_pb2_grpc.InferenceAsyncStub", rng: random.Random) -> str | None:
    """Send a request with at least one fault; return the fault of the answer."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), stopping=pb.StoppingParams(max_tokens=1))
    for _ in range(rng.randint(1, 3)):
        rng.choice(SPOILERS)(request, rng)
    return await _not_refused(partial(_generate, stub, request))


def _spoil_number(request: pb.GenerateRequest, rng: random.Random) -> None:
    name = rng.choice(("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"))
    setattr(request.sampling, name, rng.choice((math.nan, math.inf, -math.inf, -3.0, 1e30)))


def _spoil_count(request: pb.GenerateRequest, rng: random.Random) -> None:
    setattr(request.sampling, rng.choice(("n", "best_of")), rng.choice((0, 129, 2**31)))


def _spoil_ids(request: pb.GenerateRequest, rng: random.Random) -> None:
    request.token_ids.ids.append(rng.choice((-1, 2048, 2**31 - 1, -(2**31))))


def _spoil_stops(request: pb.GenerateRequest, rng: random.Random) -> None:
    request.stopping.stop.extend(rng.choice(([""], ["x"] * 17, ["x" * 257])))


def _spoil_bias(request: pb.GenerateRequest, rng: random.Random) -> None:
    request.sampling.logit_bias[rng.choice((-5, 4000, 7))] = rng.choice((math.nan, 101.0, -1e9))


def _spoil_names(request: pb.GenerateRequest, rng: random.Random) -> None:
    request.request_id = rng.choice(("a space", "x" * 129, "/"))


def _spoil_beams(request: pb.GenerateRequest, rng: random.Random) -> None:
    request.beam.beam_width = rng.choice((0, 1, 65, 2**31))


SPOILERS = (_spoil_number, _spoil_count, _spoil_ids, _spoil_stops, _spoil_bias, _spoil_names, _spoil_beams)


async def _generate(stub: "inference_pb2_grpc.InferenceAsyncStub", request: pb.GenerateRequest) -> None:
    await _first(stub.Generate(request, timeout=CALL_TIMEOUT_S))


async def _first(call: Any) -> None:
    """Reads the first message of a stream, and lets it go."""
    try:
        await call.read()
    finally:
        call.cancel()


async def _not_refused(attempt: Callable[[], Awaitable[None]]) -> str | None:
    """Describe the outcome of an attempt; None if it was refused."""
    try:
        await attempt()
    except grpc.aio.AioRpcError as error:
        return None if _is_refusal(error) else f"{error.code()}: {error.details()}"
    return "it was taken"


def _is_refusal(error: grpc.aio.AioRpcError) -> bool:
    """True if this says no, also to a number of shards that is not known yet, which random bytes may be, too."""
    return error.code() in REFUSALS or isinstance(error_of(error), ShardsChangedError)


def _talk_nonsense(address: str, rng: random.Random) -> None:
    """Send bytes that are not even HTTP/2, on connections of their own."""
    host, _, port = address.rpartition(":")
    for _ in range(50):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(rng.randbytes(rng.randint(1, 4000)))


SCENARIOS = (
    Scenario(
        fault="F21",
        title="bytes that are no messages, unknown fields, methods that are not there",
        injected="2,500 calls with raw bytes, and fifty connections that do not speak HTTP/2",
        promise="P6",
        play=bytes_that_are_no_messages,
        targets=(
            *NOTHING_LOST,
            Target(figure="crashes", at_most=0),
            Target(figure="odd_answers", at_most=0),
            Target(figure="rss_growth", at_most=0.05),
        ),
    ),
    Scenario(
        fault="F22",
        title="requests that make no sense",
        injected="3,000 requests with numbers that are none, ids out of range, stop strings without end",
        promise="P6",
        play=requests_that_make_no_sense,
        targets=(*NOTHING_LOST, Target(figure="odd_answers", at_most=0), Target(figure="crashes", at_most=0)),
    ),
    Scenario(
        fault="F23",
        title="giant prompts",
        injected="5,000 tokens, 8 MB of text, a million stop strings, 17 MB of text",
        promise="P6",
        play=giants,
        targets=(
            *NOTHING_LOST,
            Target(figure="odd_answers", at_most=0),
            Target(figure="crashes", at_most=0),
            speed("ids_beyond_model_s", 0.05),
            speed("text_of_8_mb_s", 0.5),
            speed("worst_stall_s", 1.0),
        ),
    ),
)
