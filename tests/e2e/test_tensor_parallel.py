"""Real services with tensor-parallel workers: requests answer as on one process, and no rank's end loses one.

A group lives and ends as one: whichever of its processes dies or hangs, all of it is gone soon, and requests go on
elsewhere or wait for the next group.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import quire
from tests.e2e.model_site import ModelSite
from tests.e2e.pressure_load import Margins, Shape, mixed_asks
from tests.e2e.pressure_run import Answers, answers_of, run_asks
from tests.rank_processes import assert_gone, ranks_of
from tests.services import Service, free_address
from tests.worker.tiny_models import VOCAB_SIZE, write_tiny_model

NUM_REQUESTS = 60
SHAPE = Shape(vocab_size=VOCAB_SIZE)
BLOCK_SIZE = 8
BUDGET = ("--max-batched-tokens", "48")


class Groups:
    """A model, answers of one process with room for all requests, and sites whose workers are groups."""

    def __init__(self, folder: Path, answers: Answers, largest: int) -> None:
        self.folder = folder
        self.answers = answers
        self.pool = ("--block-size", str(BLOCK_SIZE), "--num-blocks", str(int(1.2 * largest)))
        self.host_pool = ("--num-host-blocks", str(largest // 2))

    def first_answers(self, num: int) -> Answers:
        every = self.answers
        return Answers(every.asks[:num], every.completions[:num], every.margins[:num], every.model)


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Groups:
    folder = write_tiny_model("llama_gqa", tmp_path_factory.mktemp("model"))
    asks = mixed_asks(0, NUM_REQUESTS, SHAPE)
    site = ModelSite(folder)
    with site.start_worker("roomy", "--block-size", str(BLOCK_SIZE), "--num-blocks", "4000"):
        reference = asyncio.run(run_asks(site, asks, *BUDGET))
    largest = max(ask.num_worst_case_blocks(BLOCK_SIZE) for ask in asks)
    return Groups(folder, answers_of(reference, asks, Margins(site.reference)), largest)


@pytest.mark.parametrize(
    ("num_ranks", "runner"),
    [(2, "cpu"), pytest.param(4, "cpu", marks=pytest.mark.long), pytest.param(2, "device", marks=pytest.mark.long)],
)
def test_a_group_under_memory_pressure_answers_as_one_process_does(groups: Groups, num_ranks: int, runner: str) -> None:
    """Greedy, samples, beams, penalties; preempted by swap and by recomputation."""
    site = ModelSite(groups.folder)
    flags = ("--tensor-parallel", str(num_ranks), "--runner", runner, *groups.pool, *groups.host_pool)
    with site.start_worker("group", *flags) as worker:
        run = asyncio.run(run_asks(site, groups.answers.asks, *BUDGET))
        groups.answers.assert_same(run)
        assert run.num_swaps > 0 and run.recomputed_tokens > 0 and run.copied_blocks > 0
        ranks = ranks_of(worker)
        assert len(ranks) == num_ranks - 1
        assert worker.stop() == 0
    assert_gone(ranks)


def test_ranks_that_are_started_one_by_one_find_each_other(groups: Groups) -> None:
    """Ranks on several machines do so; they reduce over TCP."""
    site, address = ModelSite(groups.folder), free_address()
    of_rank_0 = ("--tensor-parallel", "2", "--rank", "0", "--group-address", f"0.0.0.0:{address.rpartition(':')[2]}")
    of_rank_1 = ("--tensor-parallel", "2", "--rank", "1", "--group-address", address, "--threads", "1")
    with Service("worker_svc", "--model", str(groups.folder), *of_rank_1, may_fork=True) as rank:
        rank.wait_for("joining group")
        with site.start_worker("group", *of_rank_0, *groups.pool, *groups.host_pool) as worker:
            few = groups.first_answers(12)
            few.assert_same(asyncio.run(run_asks(site, few.asks, *BUDGET)))
            assert worker.stop() == 0
        assert rank.wait() == 1


@pytest.fixture
def site(groups: Groups) -> Iterator[ModelSite]:
    yield ModelSite(groups.folder)


def kill_first(ranks: list[int]) -> None:
    os.kill(ranks[0], signal.SIGKILL)


def hang_last(ranks: list[int]) -> None:
    os.kill(ranks[-1], signal.SIGSTOP)


@pytest.mark.parametrize("runner", ["cpu", pytest.param("device", marks=pytest.mark.long)])
@pytest.mark.parametrize("strike", [kill_first, hang_last])
async def test_requests_of_a_group_whose_rank_is_lost_finish_elsewhere(
    groups: Groups, site: ModelSite, strike: Callable[[list[int]], None], runner: str
) -> None:
    flags = ("--tensor-parallel", "2", "--rank-timeout-s", "1.5", "--runner", runner, *groups.pool)
    with ExitStack() as stack:
        struck = stack.enter_context(site.start_worker("struck", *flags))
        stack.enter_context(site.start_worker("other", *groups.pool))
        async with site.client("--pipeline-depth", "2", num_workers=2) as client:
            ranks = ranks_of(struck)
            expected = await finished(client)
            running = asyncio.create_task(finished(client))
            await until_running(client, "struck")
            strike(ranks)
            assert await running == expected
        assert await asyncio.to_thread(struck.wait) == 1
        assert_gone(ranks)


async def test_no_rank_outlives_a_killed_rank_0(groups: Groups, site: ModelSite) -> None:
    with site.start_worker("group", "--tensor-parallel", "4", *groups.pool) as worker:
        await asyncio.to_thread(worker.wait_for, "ready")
        ranks = ranks_of(worker)
        assert len(ranks) == 3
        worker.kill()
        assert_gone(ranks)


async def finished(client: quire.AsyncClient) -> list[list[int]]:
    asks = [client.generate([3 + index, 5], max_tokens=120, temperature=0, ignore_eos=True) for index in range(4)]
    return [list(each.token_ids) for each in await asyncio.gather(*asks)]


async def until_running(client: quire.AsyncClient, worker_id: str) -> None:
    """Wait until requests run on this worker."""
    while True:
        stats = await client.stats()
        if any(each.worker_id == worker_id and each.num_running for each in stats.workers):
            return
        await asyncio.sleep(0.002)
