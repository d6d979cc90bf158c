"""Hostile answers of one worker against the real scheduler, with an honest worker beside it: others notice nothing."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import pytest
import structlog

from quire.v1 import inference_pb2 as pb
from quire.v1 import worker_pb2
from scheduler_svc.workers.workers import LEASE_MS
from tests.hostile_answers import Answer, HostileAnswer, hostile_answers
from tests.patience import patient
from tests.scheduler.journal_setup import tokens_of, until
from tests.scheduler.sample_outputs import see
from tests.scheduler.scripted_model import VOCAB_SIZE, counted
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in

KINDS = hostile_answers()
NUM_PARTS = 12  # of the kinds, each with a site of its own


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        yield made


def answer_with(worker: ScriptedWorker, kind: HostileAnswer, *, times: int | None = None) -> None:
    """Replace the worker's right answers from now on, or only the next `times`."""
    left = times

    def script(request: worker_pb2.StepRequest) -> Answer:
        nonlocal left
        response = worker.execute(request)
        if left == 0 or response.status != worker_pb2.STEP_STATUS_OK:
            return response
        left = None if left is None else left - 1
        return kind.change(response)

    worker.script = script


def every_feature(number: int) -> list[pb.GenerateRequest]:
    """Requests that together ask for all that an answer can have."""
    plain = counting(1000 + number, 6)
    told = counting(2000 + number, 6)
    told.token_ids.ids[:] = [2000, 2001, 2000 + number]
    told.output.logprobs = told.output.prompt_logprobs = 2
    beams = counting(3000 + number, 6)
    beams.beam.beam_width = 3
    beams.output.logprobs = 2
    return [plain, told, beams]


def is_credible(kind: HostileAnswer) -> bool:
    """True if the answer may contain other tokens of the vocabulary: these cannot be told from correct ones."""
    return kind.name.startswith("token_ids")


async def keep_announcing(site: Site, *workers: ScriptedWorker) -> None:
    """Announce workers periodically, so that one with a broken link is driven again."""
    while True:
        for worker in workers:
            with suppress(grpc.aio.AioRpcError):
                await site.cluster.Register(worker.registration())
        await asyncio.sleep(0.005)


def speaking(worker_id: str) -> ScriptedWorker:
    worker = ScriptedWorker(worker_id, num_blocks=256)
    worker.tells_prompt_logprobs = True
    return worker


def test_there_are_hundreds_of_kinds_and_each_has_a_name_of_its_own() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS) > 471


@pytest.mark.long
@pytest.mark.parametrize("part", range(NUM_PARTS))
async def test_whatever_a_worker_answers_requests_finish_beside_it_and_the_scheduler_lives(
    site: Site, part: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Each kind in place of all answers of a worker that is new each time, while an honest one is there."""
    honest = speaking("honest")
    await site.start_worker(honest)
    announcing = asyncio.create_task(keep_announcing(site, honest))
    with caplog.at_level(logging.ERROR), structlog.testing.capture_logs() as logs:
        for number, kind in enumerate(KINDS[part::NUM_PARTS]):
            hostile = speaking("hostile")
            hostile.description.incarnation = f"hostile-{number}"
            answer_with(hostile, kind)
            await site.start_worker(hostile)
            hostile_announcing = asyncio.create_task(keep_announcing(site, hostile))
            requests = [*every_feature(10 * number), *every_feature(10 * number + 5)]
            async with asyncio.timeout(patient(30)):
                seen = await asyncio.gather(*(see(site, each) for each in requests))
            hostile_announcing.cancel()
            for each in seen:
                assert each.error is None, f"{kind.name}: {each.error}"
            if not is_credible(kind):
                expected = [[counted(each.token_ids.ids[-1], 6)] for each in requests[::3]]
                assert [each.token_ids for each in seen[::3]] == expected, kind.name
            stats = await site.inference.GetStats(pb.GetStatsRequest())
            assert "honest" in [worker.worker_id for worker in stats.workers if not worker.out_of_service], kind.name
            site.engine.scheduler.check()
            await hostile.stop()
            if (member := site.workers.members.get("hostile")) is not None:
                member.seen_s -= LEASE_MS / 1000 + 1
                site.workers.give_up_silent(time.monotonic())
            await until(lambda: "hostile" not in [each.worker_id for each in site.workers.driven])
    announcing.cancel()
    assert not site.fatal, "no worker's word ends a scheduler"
    assert [line for line in logs if "exc_info" in line or "exception" in line] == []
    assert [record for record in caplog.records if record.exc_info] == []
    assert all(0 <= token < VOCAB_SIZE for token in await tokens_of(site.store))
    await site.idle()


NONSENSE = [
    "token_ids: all 2147483647",
    "token_ids: all -1",
    "token_ids: all 100000",
    "token_ids: one more",
    "invalid_samples: one more",
    "forced: a million",
    "epoch = 18446744073709551615",
    "sealed ones",
]


@pytest.mark.parametrize("name", NONSENSE)
async def test_a_black_hole_is_put_out_of_service_and_every_request_finishes(site: Site, name: str) -> None:
    """Sixty requests beside one worker that answers nonsense to every step."""
    (kind,) = [each for each in KINDS if each.name == name]
    honest, hostile = speaking("honest"), speaking("hostile")
    answer_with(hostile, kind)
    for worker in (hostile, honest):
        await site.start_worker(worker)
    announcing = asyncio.create_task(keep_announcing(site, honest, hostile))
    runs = await asyncio.gather(*(site.run(counting(100 * i, 12)) for i in range(60)))
    for i, messages in enumerate(runs):
        assert tokens_in(messages) == list(range(100 * i + 1, 100 * i + 13))
    stats = await site.inference.GetStats(pb.GetStatsRequest())
    reasons = {each.worker_id: each.out_of_service for each in stats.workers}
    assert reasons["honest"] == "" and "start it again" in reasons["hostile"]
    announcing.cancel()
    await site.idle()
