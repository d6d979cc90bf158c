"""Three shards on a store that is a cluster of three primaries with a replica each: nodes die, slots are moved."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import NamedTuple

import pytest

import quire
from quire.params import GenerateParams
from quire.shards import new_request_id, shard_of_id
from tests.e2e.greedy_reference import assert_greedy
from tests.e2e.model_site import all_free
from tests.e2e.scheduler_places import SchedulerPlaces
from tests.e2e.watched import Watched, until_more_has_come
from tests.patience import patient
from tests.services import Service
from tests.valkey_cluster import ValkeyCluster
from tests.worker.tiny_models import random_prompts

NUM_SHARDS = 3
NUM_TOKENS = 90
PROMPTS = random_prompts((1, 15, 16, 33, 44, 27, 9, 20, 5), seed=4)
GREEDY: GenerateParams = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}


class Output(NamedTuple):
    prompt: tuple[int, ...]
    completion: quire.Completion


async def stream_on(watched: Watched, prompt: list[int], shard: int, is_over: asyncio.Event) -> list[Output]:
    """Outputs of this prompt, again and again: the first by this shard, the last begun after nothing happens any more.

    Those in between are where the client sends them.
    """
    outputs = []
    params: GenerateParams = {**GREEDY, "request_id": new_request_id(shard)}
    while True:
        is_last = is_over.is_set()
        outputs.append(Output(tuple(prompt), await watched.run(prompt, params)))
        params = GREEDY
        if is_last:
            return outputs


class Clustered(SchedulerPlaces[ValkeyCluster]):
    """Three schedulers with a shard each, three workers, and the cluster."""

    def __init__(self, factory: pytest.TempPathFactory, stack: ExitStack) -> None:
        super().__init__(factory, stack, stack.enter_context(ValkeyCluster(num_shards=NUM_SHARDS)), NUM_SHARDS)
        self.schedulers: dict[str, Service] = {}
        self._stack = stack
        for place in self.places:
            self.start(place)

    def start(self, place: str) -> None:
        """Start a scheduler there; another one that was there has ended."""
        self.schedulers[place] = self._stack.enter_context(self.start_at(place, "--shards", str(NUM_SHARDS)))

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[quire.AsyncClient]:
        """Keep streams coming in all shards meanwhile; each is complete, equal and recorded, and leaves no block.

        New requests are refused while the store does not answer, or a leader has no worker yet, and sent again.
        """
        time_s = patient(60)
        async with quire.AsyncClient(self.address, reconnect_timeout_s=time_s, retries=round(time_s)) as client:
            await self.until_led(client)
            watched, is_over = Watched(client), asyncio.Event()
            async with asyncio.TaskGroup() as group:
                runs = [
                    group.create_task(stream_on(watched, prompt, number % NUM_SHARDS, is_over))
                    for number, prompt in enumerate(PROMPTS)
                ]
                await until_more_has_come(watched, runs)
                yield client
                is_over.set()
            outputs = [each for run in runs for each in run.result()]
            distinct = {(each.prompt, each.completion.token_ids) for each in outputs}
            prompts = [list(prompt) for prompt, _ in distinct]
            assert_greedy(self.reference, prompts, [token_ids for _, token_ids in distinct], NUM_TOKENS)
            assert {shard_of_id(each.completion.request_id, NUM_SHARDS) for each in outputs} == {*range(NUM_SHARDS)}
            for each in outputs:
                record = await client.get(each.completion.request_id)
                assert record.samples[0].token_ids == each.completion.token_ids
            await self.until_led(client)
            await all_free(client)

    async def until_led(self, client: quire.AsyncClient) -> None:
        """Return once each scheduler leads a shard with one worker."""
        async with asyncio.timeout(patient(60)):
            while True:
                shards = await client.shards()
                if {shard.leader for shard in shards} == {*self.places} and all(s.num_workers == 1 for s in shards):
                    return
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clustered]:
    with ExitStack() as stack:
        yield Clustered(tmp_path_factory, stack)


async def test_each_shard_is_on_the_node_of_its_slot(site: Clustered) -> None:
    async with site.streams():
        pass
    for shard in range(NUM_SHARDS):
        tag = "{quire:default}" if shard == 0 else f"{{quire:default/{shard}}}"
        keys = site.store.keys_of(shard)
        assert f"{tag}:journal" in keys and all(key.startswith(tag) for key in keys)
    assert len({site.store.primary_of(shard).address for shard in range(NUM_SHARDS)}) == NUM_SHARDS


async def test_requests_go_on_while_slots_are_moved_to_other_nodes_and_back(site: Clustered) -> None:
    store = site.store
    async with site.streams():
        for shard in range(NUM_SHARDS):
            source, target = store.primary_of(shard), store.primary_of((shard + 1) % NUM_SHARDS)
            await asyncio.to_thread(store.move, shard, target)
            await asyncio.to_thread(store.move_at_once, shard, source)
    ended = [each for each in site.schedulers.values() if each.process.poll() is not None]
    assert not ended
    assert not [line for each in site.schedulers.values() for line in each.lines if "again" in line["event"]]


@pytest.mark.parametrize("with_leader", [False, True])
async def test_requests_go_on_when_a_node_dies_and_its_replica_takes_over(site: Clustered, with_leader: bool) -> None:
    """Alone, or together with the scheduler that leads the shard: what was acknowledged is on the replica."""
    shard = 1 + with_leader
    killed = site.store.primary_of(shard)
    async with site.streams() as client:
        leader = (await client.shards())[shard].leader
        killed.kill()
        if with_leader:
            await asyncio.to_thread(site.schedulers[leader].kill)
        await asyncio.to_thread(site.store.until_taken_over, shard)
        if with_leader:
            await asyncio.to_thread(site.start, leader)
    assert site.store.primary_of(shard) is not killed
    killed.start()
    site.store.until(site.store.is_well)
