"""A scheduler dies without a word; the next one on the same store goes on, and clients cannot tell."""

import random

import pytest

from quire.v1 import inference_pb2 as pb
from scheduler_svc.text.tokenizer import ModelTokenizer
from tests.scheduler.journal_setup import until
from tests.scheduler.mortal_sites import Client, SlowStore, assert_as_undisturbed, lives_on, run_through_deaths
from tests.scheduler.scripted_beams import of_kind
from tests.scheduler.text_tokenizers import SPECIAL_TOKENS, byte_level_json


def mixed_requests(random_: random.Random, num_requests: int) -> list[pb.GenerateRequest]:
    """Make requests of every kind, many with log-probabilities, stop strings and prompts of several tokens."""
    tokenizer = ModelTokenizer(byte_level_json(), "", SPECIAL_TOKENS)
    requests = []
    for i in range(num_requests):
        start, length, request_id = random_.randrange(300), random_.randrange(5, 100), f"r{i}"
        request = of_kind(i % 5, start, length, request_id, random_)
        request.token_ids.ids[:] = [*(random_.randrange(400) for _ in range(random_.randrange(40))), start]
        request.on_disconnect = pb.ON_DISCONNECT_CONTINUE
        if i % 5 < 3:
            if i % 3 == 0:
                request.stopping.stop.append(tokenizer.decode([start + 12], keep_special_tokens=True))
            elif i % 3 == 1:
                request.stopping.stop_token_ids.append(start + 20)
        if i % 2:
            request.output.logprobs = i % 3
        if i % 4 == 1:
            request.output.prompt_logprobs = 1
        request.priority = i % 7 // 6
        requests.append(request)
    return requests


@pytest.mark.parametrize(("seed", "preempt_every"), [(1, None), (2, 5), (3, None), (4, 3)])
async def test_mixed_requests_survive_deaths_at_any_moment_and_every_client_sees_an_undisturbed_run(
    seed: int, preempt_every: int | None
) -> None:
    random_ = random.Random(seed)
    requests = mixed_requests(random_, 30)
    async with lives_on(SlowStore(random_), preempt_every=preempt_every) as undisturbed:
        expected = [Client(each) for each in requests]
        await run_through_deaths(undisturbed, expected, [])
    deaths = [random_.randrange(1, 8) for _ in range(6)]
    async with lives_on(SlowStore(random_), num_blocks=40 if seed % 2 else 64, preempt_every=preempt_every) as lives:
        clients = [Client(each) for each in requests]
        await run_through_deaths(lives, clients, deaths)
        await assert_as_undisturbed(lives.site, clients, expected)
        assert lives.num_lives == 7
        assert lives.num_recovered, "deaths that came too late mean nothing"


async def test_requests_that_wait_for_a_first_worker_count_as_waiting() -> None:
    """Without it nobody who scales workers by this figure would start one."""
    async with lives_on(SlowStore(random.Random(1))) as lives:
        clients = [Client(each) for each in mixed_requests(random.Random(1), 5)]
        lives.workers[0].may_answer.clear()  # nothing ends by itself
        await lives.begin()
        await lives.add_workers()
        for client in clients:
            await client.come(lives.site)
        await lives.die()
        site = await lives.begin()
        assert site.stats().num_waiting == site.recovery.num_waiting == 5
        await site.recovery.set_paused("r0", is_paused=True)
        await site.recovery.cancel("r1")
        assert (site.stats().num_waiting, site.stats().num_paused) == (3, 1)
        await lives.add_workers()
        await until(lambda: not site.recovery.num_waiting)
        assert site.stats().num_waiting + site.stats().num_running == 3
