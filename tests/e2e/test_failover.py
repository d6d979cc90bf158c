"""The scheduler that leads is killed, frozen or told to end under mixed load, and its standby goes on with it all."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager

import pytest

import quire
from common.sampling_params import SequenceSampling
from quire.params import GenerateParams
from scheduler_svc.journal.journal_entry import read_journal
from tests.e2e.beam_searches import Searches, search
from tests.e2e.greedy_reference import assert_greedy
from tests.e2e.model_site import ModelSite, all_free
from tests.e2e.sampled_reference import Drawing, assert_drawn
from tests.e2e.watched import Watched, until_more_has_come
from tests.patience import patient
from tests.scheduler.journal_setup import redis_store
from tests.services import Service, free_address, start_scheduler
from tests.valkey import ValkeyProcess
from tests.worker.tiny_models import random_prompts, write_tiny_model

LEASE_S = 1.5
LONG_LEASE_S = 30  # no standby on a busy machine comes so late that the lease has ended by itself
NUM_TOKENS = 90
PROMPTS = random_prompts((1, 15, 16, 33, 44, 27), seed=9)
DRAWINGS = [
    *(Drawing(prompt, SequenceSampling(seed=70 + i, top_p=0.9), NUM_TOKENS) for i, prompt in enumerate(PROMPTS[:3])),
    Drawing(PROMPTS[3], SequenceSampling(seed=80), NUM_TOKENS, n=4),
]
SEARCHES = [search(PROMPTS[4], 4, NUM_TOKENS, ends=())]


class Pair(ModelSite):
    """One worker, and two places for schedulers of one store. Clients and the worker know both places."""

    def __init__(self, factory: pytest.TempPathFactory, stack: ExitStack) -> None:
        super().__init__(write_tiny_model("llama_gqa", factory.mktemp("model"), seed=3))
        self.places = (free_address(), free_address())
        self.address = ",".join(self.places)
        self.store = stack.enter_context(ValkeyProcess())
        self.worker = stack.enter_context(self.start_worker("only", "--num-blocks", "600"))
        self.searches = Searches(self, SEARCHES)

    @asynccontextmanager
    async def led(self, lease_s: float = LEASE_S) -> AsyncIterator[tuple[Service, Service]]:
        """The leader, and a standby that has seen it. The standby is asked first: it stands first in the list."""
        async with self.led_alone(lease_s) as leader, self.stood_by(lease_s) as standby:
            await asyncio.to_thread(standby.wait_for, "leader seen")
            yield leader, standby
            for each in (leader, standby):
                if each.process.poll() is None:
                    assert await asyncio.to_thread(each.stop) == 0  # the next leader finds no lease

    @asynccontextmanager
    async def led_alone(self, lease_s: float = LEASE_S) -> AsyncIterator[Service]:
        """The leader. With a long lease it does not wait whether an earlier one comes back, as a standby does."""
        begins, leads = (("--standby",), "leading") if lease_s == LEASE_S else ((), "listening")
        leader, _ = await asyncio.to_thread(start_scheduler, *self._flags(lease_s), *begins, listen=self.places[1])
        with leader:
            await asyncio.to_thread(leader.wait_for, leads)
            yield leader

    @asynccontextmanager
    async def stood_by(self, lease_s: float = LEASE_S) -> AsyncIterator[Service]:
        """A standby, which may not have seen the leader yet."""
        flags = self._flags(lease_s)
        standby, _ = await asyncio.to_thread(start_scheduler, *flags, "--standby", listen=self.places[0])
        with standby:
            yield standby

    def _flags(self, lease_s: float) -> tuple[str, ...]:
        lease_ms, drain_s = str(round(lease_s * 1000)), str(patient(60))  # a standby may start slowly
        return ("--store", self.store.url, "--lease-ms", lease_ms, "--drain-timeout-s", drain_s)


class Load:
    """Requests of every kind, and what they must answer."""

    def __init__(self, pair: Pair, client: quire.AsyncClient) -> None:
        self._pair = pair
        self.watched = Watched(client)
        plain: GenerateParams = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        requests = [
            *((prompt, plain) for prompt in PROMPTS),
            *((each.prompt, each.request()) for each in DRAWINGS),
            *((each.prompt, pair.searches.request(i)) for i, each in enumerate(SEARCHES)),
        ]
        self.runs = [asyncio.create_task(self.watched.run(*request)) for request in requests]

    async def is_under_way(self) -> None:
        await until_more_has_come(self.watched, self.runs)

    async def goes_on(self) -> None:
        """Returns at the next token."""
        num_tokens = self.watched.num_tokens
        async with asyncio.timeout(patient(60)):
            while self.watched.num_tokens == num_tokens:  # noqa: ASYNC110 - what reads has nobody to tell
                await asyncio.sleep(0.005)

    async def equals_an_undisturbed_run(self) -> None:
        completions = await asyncio.gather(*self.runs)
        num_greedy, num_drawn = len(PROMPTS), len(DRAWINGS)
        outputs = [completion.token_ids for completion in completions[:num_greedy]]
        assert_greedy(self._pair.reference, PROMPTS, outputs, NUM_TOKENS)
        assert_drawn(self._pair.reference, DRAWINGS, completions[num_greedy : num_greedy + num_drawn])
        self._pair.searches.compare(completions[num_greedy + num_drawn :]).assert_cuts_are_rare()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(tmp_path_factory, stack)


async def test_a_killed_leader_is_followed_and_every_stream_goes_on(pair: Pair) -> None:
    async with pair.led() as (leader, standby), quire.AsyncClient(pair.address) as client:
        await client.wait_ready(60)
        async with quire.AsyncClient(pair.places[0]) as stranger:  # who knows the standby alone
            assert await stranger.health("") is quire.Health.SERVING
            assert await stranger.health() is quire.Health.NOT_SERVING
            assert (await stranger.model()).name
            assert (await stranger.generate(PROMPTS[0], max_tokens=3, ignore_eos=True)).usage.completion_tokens == 3
        load = Load(pair, client)
        await load.is_under_way()
        await asyncio.to_thread(leader.kill)
        assert not (await asyncio.to_thread(standby.wait_for, "lease taken"))["handed_over"]
        await load.goes_on()
        await load.equals_an_undisturbed_run()
        assert standby.wait_for("journal read")["num_live"]
        await all_free(client)


async def test_a_leader_that_was_frozen_beyond_its_lease_ends_and_has_changed_nothing(pair: Pair) -> None:
    async with pair.led() as (leader, standby), quire.AsyncClient(pair.address) as client:
        await client.wait_ready(60)
        load = Load(pair, client)
        await load.is_under_way()
        leader.signal(signal.SIGSTOP)
        epoch = (await asyncio.to_thread(standby.wait_for, "leading"))["epoch"]
        num_lines = len(leader.lines)
        await load.goes_on()
        leader.signal(signal.SIGCONT)
        assert await asyncio.to_thread(leader.wait) == 1
        late = [line["event"] for line in leader.lines[num_lines:]]
        assert late[-1] == "scheduler ends"
        assert "request ended" not in late
        await load.equals_an_undisturbed_run()
        await all_free(client)
        async with redis_store(pair.store.url) as store:
            entries = [each async for each in read_journal(store)]
        epochs = [entry_id.epoch for entry_id, _ in entries]
        assert epochs == sorted(epochs)
        assert epochs[-1] == epoch
        assert "Traceback" not in "".join(leader.raw)


async def test_a_leader_that_is_told_to_end_hands_over(pair: Pair) -> None:
    async with pair.led(LONG_LEASE_S) as (leader, standby), quire.AsyncClient(pair.address) as client:
        await client.wait_ready(60)
        load = Load(pair, client)
        await load.is_under_way()
        leader.signal(signal.SIGTERM)
        assert await asyncio.to_thread(leader.wait) == 0
        assert leader.wait_for("handed over")
        taken = await asyncio.to_thread(standby.wait_for, "lease taken")
        assert taken["handed_over"]  # nobody waited for the lease to end
        began = await asyncio.to_thread(standby.wait_for, "leading")
        assert (await client.generate(PROMPTS[0], max_tokens=3, ignore_eos=True)).usage.completion_tokens == 3
        await load.equals_an_undisturbed_run()
        await all_free(client)
        async with redis_store(pair.store.url) as store:
            entries = [each async for each in read_journal(store)]
        ends = [i for i, (entry_id, entry) in enumerate(entries) if entry.HasField("leader_end")]
        last_end = entries[ends[-1]]
        assert [field.name for field, _ in last_end[1].ListFields()] == ["leader_end"]
        assert entries[ends[-1] + 1][0] == (began["epoch"], 0)
        assert "Traceback" not in "".join(leader.raw)


async def test_a_leader_whose_store_does_not_answer_as_it_is_told_to_end_hands_over_once_it_does(pair: Pair) -> None:
    """Standbys cannot be asked for before that."""
    async with pair.led(LONG_LEASE_S) as (leader, standby), quire.AsyncClient(pair.address) as client:
        await client.wait_ready(60)
        load = Load(pair, client)
        await load.is_under_way()
        pair.worker.signal(signal.SIGSTOP)  # no request ends meanwhile
        try:
            pair.store.freeze()
            try:
                leader.signal(signal.SIGTERM)
                await asyncio.to_thread(leader.wait_for, "draining")
            finally:
                pair.store.thaw()
            assert await asyncio.to_thread(leader.wait) == 0
        finally:
            pair.worker.signal(signal.SIGCONT)
        assert leader.wait_for("handed over")
        assert (await asyncio.to_thread(standby.wait_for, "lease taken"))["handed_over"]
        await load.equals_an_undisturbed_run()
        await all_free(client)


async def test_a_leader_that_was_told_to_end_hands_over_to_a_standby_that_comes_later(pair: Pair) -> None:
    async with pair.led_alone(LONG_LEASE_S) as leader, quire.AsyncClient(pair.address) as client:
        await client.wait_ready(60)
        load = Load(pair, client)
        await load.is_under_way()
        pair.worker.signal(signal.SIGSTOP)  # no request ends meanwhile
        try:
            leader.signal(signal.SIGTERM)
            await asyncio.to_thread(leader.wait_for, "draining")
            async with pair.stood_by(LONG_LEASE_S) as standby:
                assert await asyncio.to_thread(leader.wait) == 0
                pair.worker.signal(signal.SIGCONT)
                assert leader.wait_for("handed over")
                assert (await asyncio.to_thread(standby.wait_for, "lease taken"))["handed_over"]
                await load.equals_an_undisturbed_run()
                await all_free(client)
                assert await asyncio.to_thread(standby.stop) == 0
        finally:
            pair.worker.signal(signal.SIGCONT)


async def test_leader_and_standby_that_end_together_lose_nothing(pair: Pair) -> None:
    async with quire.AsyncClient(pair.address) as client:
        async with pair.led() as (leader, standby):
            await client.wait_ready(60)
            load = Load(pair, client)
            await load.is_under_way()
            for each in (standby, leader):
                each.signal(signal.SIGTERM)
            assert await asyncio.to_thread(standby.wait) == 0
            assert await asyncio.to_thread(leader.wait) == 0
        async with pair.led():  # the next ones on the store, if anything was left to them
            await load.equals_an_undisturbed_run()
            await all_free(client)
