"""Faults of clients: killed, frozen, slow, impatient, and one request submitted by many."""

import asyncio
import resource
import signal
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import grpc

import quire
from benchmarks.report import percentile
from quire.rpc import PUBLIC_MESSAGE_BYTES, channel_options
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc
from tests.chaos.client_load import MIN_STREAMING, ClientLoad, ClientProcess
from tests.chaos.deployment import Deployment
from tests.chaos.scenario import NOTHING_LOST, Figures, Target, speed
from tests.chaos.stage import STANDARD_WORKERS, Scenario, Stage
from tests.patience import patient

GRACE_S = 1.0
KEEPALIVE_S = 2.0  # both together
QUICK_KEEPALIVE = ("--keepalive-time-s", "0.8", "--keepalive-timeout-s", "1")
GONE_TIMEOUT_S = 30.0
NUM_TWINS = 50
NUM_STALLED = 4
NUM_TURNS = 3
STALLED_TOKENS = 1500  # each is a step: a p99 of few steps is chance, as all streams have the same gaps
ALL_COMPUTED_TIMEOUT_S = 120.0
COMPUTED_POLL_S = 0.25
ENDLESS_TOKENS = 1500
TIMEOUTS_S = (0.2, 0.5, 1.0, 1.5)
NO_PROXY = ("grpc.enable_http_proxy", 0)


async def one_is_killed(stage: Stage) -> Figures:
    deployment, load = await stage.flowing()
    victim = load.clients[0]
    await load.until(lambda: len(load.streaming(victim)) >= MIN_STREAMING, "the victim reads several streams")
    struck_s = victim.send(signal.SIGKILL)
    await asyncio.to_thread(victim.wait, patient(GONE_TIMEOUT_S))
    heir = load.add_client(attach=victim.history)
    await load.until(heir.history.exists, "the heir begins")
    began_s = time.monotonic()
    recovered_s = await load.all_went_on_after(struck_s, victim)
    return await stage.figures(
        load, deployment, struck_s=struck_s, recovered_s=recovered_s, resumed_after_s=recovered_s - began_s
    )


async def they_go_away(stage: Stage) -> Figures:
    """One client dies, one freezes; their requests are cancelled after the grace, and a bystander notices nothing."""
    await stage.reference()
    deployment = stage.own(scheduler_flags=("--disconnect-grace-s", str(GRACE_S), *QUICK_KEEPALIVE))
    await deployment.begin(*STANDARD_WORKERS)
    endless = [replace(ask, max_tokens=ENDLESS_TOKENS) for ask in stage.asks if ask.streams and not ask.stop]
    load = stage.load(deployment.address, on_disconnect=quire.OnDisconnect.CANCEL, asks=endless)
    bystander = stage.load(deployment.address, concurrency=4)
    for each in (load, bystander):
        await each.until_flowing()
    killed, frozen = load.clients
    killed_s = killed.send(signal.SIGKILL)
    killed_gone_s = await _all_cancelled(deployment, load, killed, killed_s)
    frozen_s = frozen.send(signal.SIGSTOP)
    frozen_gone_s = await _all_cancelled(deployment, load, frozen, frozen_s)
    frozen.send(signal.SIGKILL)
    return await stage.figures(
        bystander,
        deployment,
        cancelled_after_death_s=killed_gone_s - killed_s,
        cancelled_after_freeze_s=frozen_gone_s - frozen_s,
    )


async def _all_cancelled(deployment: Deployment, load: ClientLoad, client: ClientProcess, gone_s: float) -> float:
    """Time when all requests of a client are seen cancelled. Raises AssertionError if one ends otherwise."""
    load.update()
    mine = [told for told in load.history.requests.values() if told.request_id.startswith(f"{client.name}-")]
    waiting = {told.request_id for told in mine if told.ended_s is None and told.accepted_s is not None}
    async with deployment.client() as asking:
        while waiting:
            assert time.monotonic() < gone_s + patient(GONE_TIMEOUT_S), f"still there: {waiting}"
            for request_id in sorted(waiting):
                if (await asking.get(request_id)).state is quire.RequestState.CANCELLED:
                    waiting.discard(request_id)
            await asyncio.sleep(0.02)
    return time.monotonic()


async def many_submit_the_same(stage: Stage) -> Figures:
    deployment, load = await stage.flowing()
    reference = await stage.reference()
    index = next(index for index, ask in enumerate(stage.asks) if ask.streams and not ask.stop)
    ask, expected = stage.asks[index], reference.completions[index]
    params = ask.params() | {"request_id": "twin"}
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(deployment.client()) for _ in range(10)]
        runs = (clients[twin % len(clients)].generate(list(ask.prompt), **params) for twin in range(NUM_TWINS))
        completions = await asyncio.gather(*runs)
        completions.append(await clients[0].generate(list(ask.prompt), **params))  # replayed
        try:
            await clients[1].generate([5, 6, 7], request_id="twin", max_tokens=3)
            other_body_taken = 1
        except quire.AlreadyExistsError:
            other_body_taken = 0
    outputs = [tuple(sample.token_ids for sample in completion.samples) for completion in completions]
    admitted = deployment.scheduler.logged("request ended")
    return await stage.figures(
        load,
        deployment,
        runs=sum(line["request_id"] == "twin" for line in admitted),
        different_answers=len(set(outputs)) - 1,
        other_body_taken=other_body_taken,
        other_than_alone=int(outputs[0][0] != expected.samples[0].token_ids),
    )


async def some_do_not_read(stage: Stage) -> Figures:
    deployment, load = await stage.flowing()
    pid = deployment.scheduler.service.process.pid
    beside_readers: list[list[float]] = []
    beside_stalled: list[list[float]] = []
    rss_growth = num_wrong = 0
    options = [*channel_options(PUBLIC_MESSAGE_BYTES), NO_PROXY]
    async with grpc.aio.insecure_channel(deployment.address, options=options) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        for turn in range(NUM_TURNS):  # in turn, so that what else the machine does meets both alike
            # First as many that are read: what computing them costs the others is not the fault's doing.
            began_s = time.monotonic()
            read = _long_requests(f"read-{turn}")
            num_wrong += sum(await asyncio.gather(*(_num_wrong_positions(stub.Generate(each)) for each in read)))
            load.update()
            beside_readers += load.gaps(began_s, time.monotonic())
            rss_before = resident_bytes(pid)
            struck_s = time.monotonic()
            stalled = _long_requests(f"stalled-{turn}")
            calls = [stub.Generate(each) for each in stalled]
            for call in calls:
                await call.read()  # accepted; nothing after it is read
            await _until_all_computed(deployment, {each.request_id for each in stalled})
            load.update()
            beside_stalled += load.gaps(struck_s, time.monotonic())
            rss_growth = max(rss_growth, resident_bytes(pid) - rss_before)
            for call in calls:
                num_wrong += await _num_wrong_positions(call)
    return await stage.figures(
        load,
        deployment,
        rss_growth_mb=rss_growth / 1e6,
        stalled_positions_wrong=num_wrong,
        others_p99_ratio=p99(beside_stalled) / p99(beside_readers),
    )


def _long_requests(name: str) -> list[pb.GenerateRequest]:
    return [
        pb.GenerateRequest(
            request_id=f"{name}-{number}",
            token_ids=pb.TokenIds(ids=[5, 6, 7, 8 + number]),
            sampling=pb.SamplingParams(temperature=0),
            stopping=pb.StoppingParams(max_tokens=STALLED_TOKENS, ignore_eos=True),
            output=pb.OutputParams(token_ids=True, logprobs=5),
        )
        for number in range(NUM_STALLED)
    ]


async def _until_all_computed(deployment: Deployment, due: set[str]) -> None:
    give_up_s = time.monotonic() + patient(ALL_COMPUTED_TIMEOUT_S)
    while missing := due - {line["request_id"] for line in deployment.scheduler.logged("request ended")}:
        assert time.monotonic() < give_up_s, f"not computed: {sorted(missing)}"
        await asyncio.sleep(COMPUTED_POLL_S)


async def _num_wrong_positions(call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]") -> int:
    due = 0
    while isinstance(response := await call.read(), pb.GenerateResponse):
        if response.HasField("chunk"):
            if response.chunk.position != due:
                return STALLED_TOKENS
            due += response.chunk.num_tokens
    return abs(STALLED_TOKENS - due)


async def deadlines_pass(stage: Stage) -> Figures:
    deployment, load = await stage.flowing()
    overruns = []
    async with deployment.client() as client:
        runs = [
            client.generate(
                [9, 10, 11, number], max_tokens=1800, ignore_eos=True, timeout_s=timeout_s, request_id=f"late-{number}"
            )
            for number, timeout_s in enumerate(TIMEOUTS_S * 3)
        ]
        outcomes = await asyncio.gather(*runs, return_exceptions=True)
        for number, timeout_s in enumerate(TIMEOUTS_S * 3):
            record = await client.get(f"late-{number}")
            overruns.append((record.timings.finished_s or float("inf")) - timeout_s)
    return await stage.figures(
        load,
        deployment,
        not_expired=sum(not isinstance(outcome, quire.RequestExpiredError) for outcome in outcomes),
        overrun_s=max(overruns),
    )


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in use."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def p99(gaps: list[list[float]]) -> float:
    """Compute p99 over all gaps together."""
    return percentile([gap for each in gaps for gap in each], 99)


SCENARIOS = (
    Scenario(
        fault="F10",
        title="client killed, another goes on from its positions",
        injected="SIGKILL of an SDK process in the gateway's place; another attaches with its positions",
        promise="P1 P2",
        play=one_is_killed,
        targets=(*NOTHING_LOST, speed("resumed_after_s", 1.0)),
    ),
    Scenario(
        fault="F24",
        title="one request submitted by fifty at once, with another body, and after its end",
        injected="fifty submissions of one request_id over ten connections",
        promise="P1 P2",
        play=many_submit_the_same,
        targets=(
            *NOTHING_LOST,
            Target(figure="runs", at_most=1),
            Target(figure="different_answers", at_most=0),
            Target(figure="other_body_taken", at_most=0),
        ),
    ),
    Scenario(
        fault="F25",
        title="clients that go away: dead, and frozen",
        injected="SIGKILL and SIGSTOP of client processes; grace 1 s, keepalive 0.8 s + 1 s",
        promise="P6 P7",
        play=they_go_away,
        targets=(
            *NOTHING_LOST,
            speed("cancelled_after_death_s", GRACE_S + 0.5),
            speed("cancelled_after_freeze_s", KEEPALIVE_S + GRACE_S + 0.5),
        ),
    ),
    Scenario(
        fault="F26",
        title="readers that do not read",
        injected="four streams of 1,500 tokens with log-probabilities, of which nothing is read until they have ended",
        promise="P2 P6",
        play=some_do_not_read,
        targets=(
            *NOTHING_LOST,
            Target(figure="stalled_positions_wrong", at_most=0),
            speed("rss_growth_mb", 32),
            speed("others_p99_ratio", 1.1),
        ),
    ),
    Scenario(
        fault="F27",
        title="deadlines that pass, queued and running",
        injected="requests for 1,800 tokens within 0.2 to 1.5 s",
        promise="P1 P6 P7",
        play=deadlines_pass,
        targets=(*NOTHING_LOST, Target(figure="not_expired", at_most=0), speed("overrun_s", 0.1)),
    ),
)
