"""The journal tells all: who replays it gets what clients got, and clients got nothing that was not in it."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from common.step import LogprobRows, StepResult
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.store import EntryId
from scheduler_svc.requests.live.output_stream import Subscription
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_replay import Replay, ReplayedRequest, merged, replayed
from tests.scheduler.journal_setup import entries_of, until
from tests.scheduler.sample_outputs import RequestSeen, record_of, sampled, see
from tests.scheduler.scripted_beams import of_kind, searching
from tests.scheduler.serving_site import Site, counting, running_site

SICK_TOKEN = 5555
UNWANTED = "unwanted"  # request_id


class ReplayingStore(MemoryStore):
    """Takes its time, so that entries are of every size; knows by replay what was acknowledged."""

    def __init__(self, random_: random.Random) -> None:
        super().__init__()
        self.replay = Replay()
        self.num_entries = 0
        self.at_entry: dict[int, Callable[[], None]] = {}
        self._random = random_

    async def append(self, entry_id: EntryId, payload: bytes, *, create: bool = False) -> None:
        for _ in range(self._random.choice([0, 1, 5, 60])):
            await asyncio.sleep(0)
        await super().append(entry_id, payload, create=create)
        self.replay.apply(journal_pb2.JournalEntry.FromString(payload))
        self.num_entries += 1
        self.at_entry.pop(self.num_entries, _nothing)()


def _nothing() -> None:
    pass


@dataclass(slots=True, eq=False)
class CheckingReader:
    """Takes at each news what there is, and compares it with what is durable at that moment."""

    store: ReplayingStore
    seen: RequestSeen = field(default_factory=RequestSeen)

    def take(self, place: Subscription) -> None:
        chunks = pb.SessionResponse()
        place.take_chunks(lambda: chunks.events.add().chunk, 1_000_000)
        for event in chunks.events:
            self.seen.add_chunk(event.chunk)
        request_id = place.stream.accepted.request_id
        durable = self.store.replay.requests[request_id]
        for seen, sample in zip(self.seen.samples, durable.samples[: len(self.seen.samples)], strict=True):
            assert seen.token_ids == sample.token_ids[: len(seen.token_ids)]
            assert seen.finish is None or seen.finish == sample.finish
        if place.done:
            assert durable.end is not None and place.stream.finished is not None
            self.seen.finish(place.stream.finished)


def mixed_requests(random_: random.Random) -> list[pb.GenerateRequest]:
    """Ten of each kind, half of them with log-probabilities."""
    requests = []
    for i in range(50):
        start, length, request_id = random_.randrange(5000), random_.randrange(1, 25), f"r{i}"
        request = of_kind(i % 5, start, length, request_id, random_)
        if i % 5 < 3:
            request.stopping.stop_token_ids.append(start + 12)
        if i % 2:
            request.output.logprobs = i % 3
        requests.append(request)
    sick = sampled(SICK_TOKEN - 9, 30, 3, "sick")
    return [*requests, sick, counting(SICK_TOKEN - 3, 30, "sick-too"), counting(10, 500, UNWANTED)]


async def run_all(site: Site, store: ReplayingStore, requests: Sequence[pb.GenerateRequest]) -> list[RequestSeen]:
    """Runs all with a reader for each; every seventh is cancelled in its course, if it runs then, and one at once."""
    readers = []
    for i, request in enumerate(requests):
        if i % 7 == 6:
            later = store.num_entries + 3 + i // 7
            store.at_entry[later] = partial(site.control.cancel_live, request.request_id)
        stream, _ = await site.admission.submit(request, None)
        readers.append(CheckingReader(store))
        place = site.readers.subscribe(stream, (), readers[-1].take)
        readers[-1].take(place)
    site.control.cancel_live(UNWANTED)
    await until(lambda: all(reader.seen.finished is not None for reader in readers))
    return [reader.seen for reader in readers]


def assert_same(seen: RequestSeen, request: ReplayedRequest, wants_logprobs: bool) -> None:
    assert request.end is not None
    assert (request.end.state, request.end.error) == (seen.end.state, seen.end.error)
    assert [sample.token_ids for sample in request.samples] == seen.token_ids
    assert [sample.finish for sample in request.samples] == [sample.finish for sample in seen.samples]
    for sample, replayed_sample in zip(seen.samples, request.samples, strict=True):
        assert sample.logprobs == (replayed_sample.logprobs if wants_logprobs else [])
        assert not wants_logprobs or len(sample.logprobs) == len(sample.token_ids)


def grouped_anew(entries: Sequence[journal_pb2.JournalEntry], random_: random.Random) -> list[journal_pb2.JournalEntry]:
    """Neighbours joined."""
    groups = []
    start = 0
    while start < len(entries):
        end = start + random_.randrange(1, 12)
        groups.append(merged(entries[start:end]))
        start = end
    return groups


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preempt_every", [None, 7])
async def test_a_replay_gives_what_clients_got_whatever_the_grouping_and_clients_got_nothing_before(
    depth: int, preempt_every: int | None
) -> None:
    random_ = random.Random(depth)
    requests = mixed_requests(random_)
    store = ReplayingStore(random_)
    async with running_site(store, pipeline_depth=depth, preempt_every=preempt_every) as site:
        worker = await site.add_worker(num_blocks=200)
        worker.make_invalid(SICK_TOKEN)
        seen = await run_all(site, store, requests)
        await site.idle()
        entries = [entry for _, entry in await entries_of(store)]
    states = {each.end.state for each in seen}
    assert states == {pb.REQUEST_STATE_FINISHED, pb.REQUEST_STATE_CANCELLED, pb.REQUEST_STATE_FAILED}
    groupings = [entries, [merged(entries)], *(grouped_anew(entries, random_) for _ in range(3))]
    for grouping in groupings:
        replay = replayed(grouping)
        assert len(replay.requests) == len(requests)
        for request, each in zip(requests, seen, strict=True):
            assert_same(each, replay.requests[request.request_id], request.output.HasField("logprobs"))
            assert list(request.token_ids.ids) == replay.requests[request.request_id].prompt


@pytest.mark.parametrize("kind", ["samples", "ranked", "beams"])
async def test_nothing_is_released_before_its_entry_is_acknowledged(kind: str) -> None:
    store = GatedStore()
    request = {
        "samples": sampled(100, 9, 3, "kept"),
        "ranked": sampled(100, 9, 2, "kept", best_of=4),
        "beams": searching(100, 9, 3, "kept"),
    }[kind]
    request.stopping.ignore_eos = True
    async with running_site(store) as site:
        worker = await site.add_worker()
        worker.may_answer.clear()
        running = asyncio.create_task(see(site, request))
        await until(lambda: bool(worker.steps))
        store.may_append.clear()
        worker.may_answer.set()
        live = site.engine.live["kept"]
        await until(lambda: live.ended_state is not None)
        await until(lambda: store.num_waiting == 1)
        record = await record_of(site, "kept")
        assert record.state == pb.REQUEST_STATE_RUNNING and not record.usage.completion_tokens
        assert not any(sample.token_ids or sample.HasField("finish") for sample in record.samples)
        for sample in live.samples:
            assert sample.finish is not None and sample.stream.num_released == 0 and sample.stream.finish is None
        assert live.stream.finished is None and "kept" in site.engine.live
        store.may_append.set()
        seen = await running
        assert seen.end.state == pb.REQUEST_STATE_FINISHED
        assert seen.end.usage.completion_tokens == 9 * len(seen.samples) > 9
        entries = [entry for _, entry in await entries_of(store)]
        assert len(entries) <= 5, "what piled up was written together"
        assert_same(seen, replayed(entries).requests["kept"], wants_logprobs=False)
        await site.idle()


async def test_results_taken_together_are_one_record_with_each_log_probability_beside_its_token() -> None:
    """Two steps in flight whose answers come at once, as two workers' may."""
    async with running_site(pipeline_depth=2) as site:
        worker = await site.add_worker()
        await worker.stop()
        await site.until_nobody_is_left()
        scheduler, engine = site.engine.scheduler, site.engine
        scheduler.workers.add_worker("ghost", num_blocks=64, block_size=16, num_seats=9)  # 2 + 3 + 4, not driven
        requests = [sampled(100 * i, 2, 2 + i, f"r{i}") for i in range(3)]
        for request in requests:
            request.output.logprobs = 0
        running = [asyncio.create_task(see(site, request)) for request in requests]
        await until(lambda: len(engine.live) == 3)
        plans = [scheduler.schedule("ghost") for _ in range(2)]
        num_entries = site.journal.stats.entries
        for number, plan in enumerate(plans, start=1):
            assert plan is not None
            token_ids = [1000 * number + index for index in range(len(plan.sampled_sequences))]
            rows = {index: LogprobRows(logprobs=[-1.0], ranks=[1]) for index in range(len(token_ids))}
            result = StepResult(epoch=1, step_id=plan.step_id, token_ids=token_ids, logprobs=rows)
            engine.take_result(plan, result)
        engine.settle()
        await until(lambda: not site.journal.stats.pending)
        assert site.journal.stats.entries == num_entries + 1
        replay = replayed([entry for _, entry in await entries_of(site.store)])
        for request, seen in zip(requests, await asyncio.gather(*running), strict=True):
            assert [len(tokens) for tokens in seen.token_ids] == [2] * request.sampling.n
            assert_same(seen, replay.requests[request.request_id], wants_logprobs=True)
        await site.idle()
