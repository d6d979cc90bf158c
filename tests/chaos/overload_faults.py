"""Overload: too many requests, sequences, connections."""

import asyncio
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass

import grpc

import quire
from benchmarks.report import percentile
from quire.rpc import PUBLIC_MESSAGE_BYTES, channel_options
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc
from tests.chaos.client_faults import NO_PROXY
from tests.chaos.scenario import NOTHING_LOST, Figures, Target, nothing, speed
from tests.chaos.stage import STANDARD_WORKERS, Scenario, Stage
from tests.chaos_input.exhaustion import NO_LIMITS, until_full
from tests.patience import patient

PEAK_CONCURRENCY = 32
SPAN_S = 30.0
OVERLOAD = 10
PROMPT_TOKENS = 48
OUTPUT_TOKENS = 160  # ten times too much is then some 60 requests a second: what offers them takes little of two cores
MAX_WAIT_MS = 12  # meant to be waited at most, as long as a first token takes at half load; p99 is some times that
NUM_FILES = 256
NUM_IDLE = 5000
OPEN_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Attempt:
    """One request of an open loop. One that was accepted and is not whole in the end is lost."""

    submitted_s: float
    accepted_s: float | None = None
    first_token_s: float | None = None
    refused_s: float | None = None  # before it was accepted
    finished_s: float | None = None  # with all its tokens
    num_tokens: int = 0
    error: str = ""  # that it ended with after it was accepted


async def ten_times_too_much(stage: Stage) -> Figures:
    deployment = stage.own(scheduler_flags=("--max-queue-wait-ms", str(MAX_WAIT_MS), "--max-num-seqs", "8"))
    await deployment.begin("worker-0")  # it leaves a core to who answers: what is measured is not how cores are shared
    async with quire.AsyncClient(deployment.address, retries=0) as client:
        await _closed_loop(client, SPAN_S / 2)  # speeds are learnt
        before_per_s = await _closed_loop(client, SPAN_S)
        half = await _open_loop(client, before_per_s / 2)
        full = await _open_loop(client, before_per_s * OVERLOAD)
        after_per_s = await _closed_loop(client, SPAN_S)
    peak_per_s = (before_per_s + after_per_s) / 2  # one alone moves by a quarter with what else the machine does
    began_s = full[0].submitted_s
    goodput = sum(each.finished_s is not None and each.finished_s < began_s + SPAN_S for each in full) / SPAN_S
    refusals = [each.refused_s - each.submitted_s for each in full if each.refused_s is not None]
    half_p99_s, full_p99_s = _first_token_p99(half), _first_token_p99(full)
    return Figures(
        sent=len(full),
        accepted=sum(each.accepted_s is not None for each in full),
        lost=count_lost(full),
        leaked_blocks=await deployment.leaked_blocks(),
        more={
            "peak_per_s": peak_per_s,
            "offered_per_s": len(full) / SPAN_S,
            "half_load_ttft_p99_s": half_p99_s,
            "overload_ttft_p99_s": full_p99_s,
            "ttft_p99_ratio": full_p99_s / half_p99_s,
            "goodput_shortfall": 1 - goodput / peak_per_s,
            "refusal_p50_s": percentile(refusals, 50) if refusals else SPAN_S,
            "refusal_p99_s": percentile(refusals, 99) if refusals else SPAN_S,
        },
        reasons=[f"{each.num_tokens} tokens, then {each.error or 'the end'}" for each in full if _is_lost(each)],
    )


async def _closed_loop(client: quire.AsyncClient, seconds: float) -> float:
    """Measure requests finished a second, with as many at once as keep everything busy."""
    began_s = time.monotonic()
    num_finished = 0

    async def one_after_another() -> None:
        nonlocal num_finished
        while time.monotonic() < began_s + seconds:
            attempt = Attempt(time.monotonic())
            await attempt_one(client, attempt)
            num_finished += attempt.finished_s is not None
            if attempt.refused_s is not None:
                await asyncio.sleep(0.05)

    await asyncio.gather(*(one_after_another() for _ in range(PEAK_CONCURRENCY)))
    return num_finished / (time.monotonic() - began_s)


async def _open_loop(client: quire.AsyncClient, per_s: float) -> list[Attempt]:
    """Send at a fixed rate for a span, whatever the answers; then wait for the admitted requests."""
    attempts: list[Attempt] = []
    async with asyncio.TaskGroup() as group:
        async for at_s in _ticks(per_s):
            attempts.append(Attempt(at_s))
            group.create_task(attempt_one(client, attempts[-1]))
    return attempts


async def _ticks(per_s: float) -> AsyncIterator[float]:
    began_s = time.monotonic()
    for number in range(int(per_s * SPAN_S)):
        await asyncio.sleep(max(0.0, began_s + number / per_s - time.monotonic()))
        yield time.monotonic()


async def attempt_one(client: quire.AsyncClient, attempt: Attempt) -> None:
    """Send one request and note what comes of it. Raises if it is refused for another reason than too much load."""
    number = int(attempt.submitted_s * 1e6) % 1500
    prompt = [5 + number + index % 7 for index in range(PROMPT_TOKENS)]
    try:
        async with client.stream(prompt, max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True) as stream:
            await stream.accepted()
            attempt.accepted_s = time.monotonic()
            async for chunk in stream:
                attempt.first_token_s = attempt.first_token_s or time.monotonic()
                attempt.num_tokens += len(chunk.token_ids)
    except quire.QuireError as error:
        if attempt.accepted_s is not None:
            attempt.error = f"{type(error).__name__}: {error.message}"
        elif isinstance(error, quire.OverloadedError | quire.UnavailableError):
            attempt.refused_s = time.monotonic()
        else:
            raise
        return
    if attempt.num_tokens == OUTPUT_TOKENS:
        attempt.finished_s = time.monotonic()


def count_lost(attempts: Iterable[Attempt]) -> int:
    """Count the requests that were accepted, and did not finish with all their tokens."""
    return sum(map(_is_lost, attempts))


def _is_lost(attempt: Attempt) -> bool:
    return attempt.accepted_s is not None and attempt.finished_s is None


def _first_token_p99(attempts: list[Attempt]) -> float:
    times = [each.first_token_s - each.submitted_s for each in attempts if each.first_token_s is not None]
    return percentile(times, 99)


async def memory_is_short(stage: Stage) -> Figures:
    await stage.reference()
    largest = max(ask.num_worst_case_blocks(16) for ask in stage.asks)
    deployment = stage.own(num_blocks=int(1.2 * largest) + 2, num_host_blocks=largest)
    await deployment.begin("worker-0")
    load = stage.load(deployment.address)
    await load.until_flowing(2500)
    figures = await stage.figures(load, deployment)
    async with deployment.client() as client:
        stats = await client.stats()
    preemptions = sum(worker.num_preemptions for worker in stats.workers)
    figures.more = {"preemptions": preemptions, "preemptions_per_request": preemptions / max(1, figures.accepted)}
    return figures


async def files_run_out(stage: Stage) -> Figures:
    """The scheduler may open 256 files; thousands of connections want in, and thousands of streams stay idle."""
    await stage.reference()
    deployment = stage.own(scheduler_flags=NO_LIMITS)  # which would refuse most of the crowd
    await deployment.begin(*STANDARD_WORKERS)
    pid = deployment.scheduler.service.process.pid
    load = stage.load(deployment.address)
    await load.until_flowing()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (NUM_FILES, NUM_FILES))
    options = [*channel_options(PUBLIC_MESSAGE_BYTES), NO_PROXY]
    async with grpc.aio.insecure_channel(deployment.address, options=options) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        streams = [stub.Session(_silence()) for _ in range(NUM_IDLE)]
        async with asyncio.timeout(patient(OPEN_TIMEOUT_S)):
            await asyncio.gather(*(each.wait_for_connection() for each in streams), return_exceptions=True)
        await load.until_flowing()
        idle_streams = num_open(streams)
        sockets = _connect_many(deployment.address)
        try:
            is_full = await _is_filled(pid)
            await load.until_flowing()
            idle_connections = num_established(sockets)
        finally:
            for each in sockets:
                each.close()
        for stream in streams:
            stream.cancel()
    async with deployment.client() as client:
        completion = await client.generate([5, 6, 7], max_tokens=4, temperature=0, ignore_eos=True)
    figures = await stage.figures(load, deployment)
    figures.more = {
        "idle_connections": idle_connections,
        "idle_streams": idle_streams,
        "streams_not_open": NUM_IDLE - idle_streams,
        "files_never_full": int(not is_full),
        "crashes": deployment.num_over,
        "unserved_after": 4 - len(completion.token_ids),
    }
    return figures


async def _silence() -> AsyncIterator[pb.SessionRequest]:
    await asyncio.Event().wait()
    yield pb.SessionRequest()


async def _is_filled(pid: int) -> bool:
    """True once a process has all the files that it may have; False if it does not get there."""
    try:
        await until_full(pid, NUM_FILES)
    except TimeoutError:
        return False
    return True


def num_open(calls: Iterable[grpc.aio.Call]) -> int:
    """Count the calls that have not ended: a refused one has."""
    return sum(not call.done() for call in calls)


def num_established(sockets: Iterable[socket.socket]) -> int:
    """Count the connections that have a peer, so that the server's system has taken them at least."""
    num = 0
    for each in sockets:
        with suppress(OSError):
            each.getpeername()
            num += 1
    return num


def _connect_many(address: str) -> list[socket.socket]:
    """Begin up to NUM_IDLE connections; the server may take them or not."""
    host, _, port = address.rpartition(":")
    sockets = []
    for _ in range(NUM_IDLE):
        try:
            each = socket.socket()
        except OSError:
            break
        each.setblocking(False)
        each.connect_ex((host, int(port)))
        sockets.append(each)
    return sockets


SCENARIOS = (
    Scenario(
        fault="F28",
        title="ten times more requests than can be served",
        injected="an open loop at ten times the peak, after one at half of it; one worker, --max-queue-wait-ms 12",
        promise="P5 P7",
        play=ten_times_too_much,
        targets=(
            *nothing("lost", "leaked_blocks"),
            speed("ttft_p99_ratio", 3.0),
            speed("goodput_shortfall", 0.1),
            speed("refusal_p50_s", 0.01),
        ),
    ),
    Scenario(
        fault="F29",
        title="KV memory for little more than one request",
        injected="a pool of 1.2 times what the largest request may need",
        promise="P1 P2 P7",
        play=memory_is_short,
        targets=(*NOTHING_LOST, Target(figure="preemptions_per_request", at_most=20)),
    ),
    Scenario(
        fault="F33",
        title="no more files: 5,000 idle streams, and up to 5,000 idle connections",
        injected="a limit of 256 files for the scheduler's process, whose limits of calls and sessions are off",
        promise="P5 P6",
        play=files_run_out,
        targets=(
            *NOTHING_LOST,
            *(
                Target(figure=name, at_most=0)
                for name in ("streams_not_open", "files_never_full", "crashes", "unserved_after")
            ),
        ),
    ),
)
