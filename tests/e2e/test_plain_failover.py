"""Failover as the comments of inference.proto tell it: a client that knows nothing else goes on at its positions."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import quire
from quire.v1 import inference_pb2 as pb
from tests.e2e.greedy_reference import assert_greedy
from tests.e2e.plain_client import PlainRun, generate
from tests.e2e.test_failover import NUM_TOKENS, PROMPTS, Pair
from tests.patience import patient


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(tmp_path_factory, stack)


@pytest.mark.parametrize("death", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
async def test_a_client_of_the_stubs_alone_goes_on_after_a_failover(pair: Pair, death: signal.Signals) -> None:
    async with pair.led() as (leader, _), quire.AsyncClient(pair.address) as client:
        await client.wait_ready(60)
        prompts = PROMPTS * 30  # enough that some are under way when the first has its first token
        runs = [PlainRun() for _ in prompts]
        reading = []
        for i, (prompt, run) in enumerate(zip(prompts, runs, strict=True)):
            request = pb.GenerateRequest(request_id=f"{death.name}-{i}", token_ids=pb.TokenIds(ids=prompt))
            request.sampling.temperature = 0
            request.stopping.max_tokens, request.stopping.ignore_eos = NUM_TOKENS, True
            request.output.token_ids = True
            reading.append(asyncio.create_task(generate(pair.places, request, run)))
        async with asyncio.timeout(patient(60)):
            while not any(run.token_ids for run in runs):  # noqa: ASYNC110 - what reads has nobody to tell
                await asyncio.sleep(0.005)
        leader.signal(death)
        async with asyncio.timeout(patient(60)):
            await asyncio.gather(*reading)
        assert_greedy(pair.reference, prompts, [run.token_ids for run in runs], NUM_TOKENS)
        assert all(run.finished is not None and run.finished.state == pb.REQUEST_STATE_FINISHED for run in runs)
        for i, run in enumerate(runs):
            kept = await client.get(f"{death.name}-{i}")
            assert kept.samples[0].text == run.text and list(kept.samples[0].token_ids) == run.token_ids
        assert any(run.num_calls > 2 for run in runs)
