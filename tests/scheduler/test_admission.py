"""The door: who comes in, in which order, under which id, and what a slow or silent store does to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import pytest

from common.arrays import unpack_int32
from quire.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from quire.rpc import error_of
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.journal.store import FencedError, Store
from scheduler_svc.requests.params.prompt_tokenizer import Prompt, PromptTokenizer
from scheduler_svc.requests.params.served_model import ServedModel
from tests.hostile.attacks import GENERATE
from tests.hostile.raw_connection import RawConnection, message
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import entries_of, until
from tests.scheduler.refusals import code_of, refusal_of
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in


@pytest.fixture
async def store() -> GatedStore:
    return GatedStore()


@pytest.fixture
async def site(store: GatedStore) -> AsyncIterator[Site]:
    async with running_site(store, admission_timeout_s=0.2) as made:
        yield made
        store.may_append.set()
        store.may_read.set()


class GatedPrompts(PromptTokenizer):
    """Prompts that are not tokenised until they may be."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = asyncio.Event()
        self.num_begun = 0

    async def token_ids(self, prompt: Prompt, model: ServedModel, tenant: str = "") -> list[int]:
        self.num_begun += 1
        await self.may_go_on.wait()
        return await super().token_ids(prompt, model, tenant)


def told_to_come_back_soon(refusal: grpc.aio.AioRpcError, *words: str) -> None:
    error = error_of(refusal)
    assert isinstance(error, UnavailableError)
    assert 0 < error.retry_after_s <= 2
    for each in words:
        assert each in error.message


async def journaled(store: Store) -> list[journal_pb2.Admission]:
    return [each for _, entry in await entries_of(store) for each in entry.admissions]


async def test_before_the_first_worker_a_request_is_told_to_come_back(site: Site) -> None:
    told_to_come_back_soon(await refusal_of(site.run(counting(10))))
    assert (await site.inference.GetStats(pb.GetStatsRequest())).num_refused == 1


async def test_while_no_worker_is_connected_a_request_that_would_fit_the_last_one_waits(site: Site) -> None:
    worker = await site.add_worker(num_blocks=8)
    await worker.stop()
    await until(lambda: not site.workers.members)
    error = await refusal_of(site.run(counting(10, 8 * 16 + 1)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    waiting = asyncio.create_task(site.run(counting(10)))
    await until(lambda: bool(site.engine.live))
    await site.add_worker("w2")
    assert tokens_in(await waiting) == [11, 12, 13, 14]


async def test_a_prompt_too_long_for_its_samples_is_refused_with_the_longest_that_is_taken(site: Site) -> None:
    await site.add_worker(num_blocks=8)

    def four_samples(num_prompt_tokens: int) -> pb.GenerateRequest:
        request = counting(10, 1, sampling=pb.SamplingParams(n=4))
        request.token_ids.ids[:] = [10] * num_prompt_tokens
        return request

    for num_prompt_tokens in (200, 80):
        error = await refusal_of(site.run(four_samples(num_prompt_tokens)))
        assert "shorten it to at most 79, lower n" in str(error.details())
    assert await site.run(four_samples(79))


async def test_the_same_request_twice_at_once_runs_once(site: Site) -> None:
    await site.add_worker()
    messages = await asyncio.gather(*(site.run(counting(10, 8, "same")) for _ in range(5)))
    assert all(tokens_in(each) == list(range(11, 19)) for each in messages)
    assert sorted(each[0].accepted.attached for each in messages) == [False, True, True, True, True]
    again = await site.run(counting(10, 8, "same"))
    assert again[0].accepted.attached and tokens_in(again) == list(range(11, 19))
    assert site.engine.num_admitted == 1


async def test_another_body_under_a_known_id_is_refused_at_every_stage(site: Site, store: GatedStore) -> None:
    """Stages: on its way in, live, and recorded."""
    worker = await site.add_worker()
    worker.may_answer.clear()
    store.may_read.clear()
    first = asyncio.create_task(site.run(counting(10, 4, "taken")))
    await until(lambda: store.num_reading == 1)
    second = asyncio.create_task(refusal_of(site.run(counting(20, 4, "taken"))))
    store.may_read.set()
    assert (await second).code() is grpc.StatusCode.ALREADY_EXISTS
    await until(lambda: "taken" in site.engine.live)
    _, again = await site.admission.submit(counting(10, 4, "taken"), None)
    assert again.attached
    assert await code_of(site.run(counting(20, 4, "taken"))) is grpc.StatusCode.ALREADY_EXISTS
    worker.may_answer.set()
    assert tokens_in(await first) == [11, 12, 13, 14]
    await site.idle()
    assert await code_of(site.run(counting(20, 4, "taken"))) is grpc.StatusCode.ALREADY_EXISTS


@pytest.mark.parametrize("is_owner_first", [True, False])
async def test_the_record_decides_whose_an_id_is_however_two_bodies_come(
    site: Site, store: GatedStore, is_owner_first: bool
) -> None:
    await site.add_worker()
    await site.run(counting(10, 4, "taken"))
    await until(lambda: site.records.num_pending == 0)
    store.may_read.clear()
    first, second = ((10, 20), (20, 10))[not is_owner_first]
    calls = {first: asyncio.create_task(site.admission.submit(counting(first, 4, "taken"), None))}
    await until(lambda: store.num_reading == 1)
    calls[second] = asyncio.create_task(site.admission.submit(counting(second, 4, "taken"), None))
    await asyncio.sleep(0.01)
    assert not calls[second].done()
    store.may_read.set()
    _, accepted = await calls[10]
    assert accepted.request_id == "taken"
    with pytest.raises(AlreadyExistsError):
        await calls[20]


async def test_a_burst_larger_than_the_queue_is_served_in_order_of_arrival() -> None:
    async with running_site(max_queue_requests=20) as site:
        worker = await site.add_worker()
        worker.may_answer.clear()
        runs = [asyncio.create_task(site.admission.submit(counting(i, 2, f"r{i}"), None)) for i in range(50)]
        outcomes = await asyncio.gather(*runs, return_exceptions=True)
        assert [isinstance(each, tuple) for each in outcomes] == [True] * 20 + [False] * 30
        worker.may_answer.set()
        await site.idle()


@pytest.mark.long
async def test_a_thousand_requests_wait_and_all_are_served() -> None:
    async with running_site() as site:
        worker = await site.add_worker(num_seats=64, num_blocks=256)
        worker.may_answer.clear()
        runs = [asyncio.create_task(site.run(counting(10 * i, 3))) for i in range(1000)]
        await until(lambda: site.engine.num_admitted == 1000, 60)
        assert (await site.inference.GetStats(pb.GetStatsRequest())).num_waiting >= 900
        worker.may_answer.set()
        for i, messages in enumerate(await asyncio.gather(*runs)):
            assert tokens_in(messages) == [10 * i + 1, 10 * i + 2, 10 * i + 3]
        await site.idle()


async def test_prompt_tokens_that_wait_are_bounded() -> None:
    async with running_site(max_queue_tokens=100) as site:
        worker = await site.add_worker(num_seats=1)
        worker.may_answer.clear()
        long = counting(10)
        long.token_ids.ids[:] = [7] * 60
        running = [asyncio.create_task(site.run(long))]
        await until(lambda: bool(worker.steps))
        running.append(asyncio.create_task(site.run(long)))
        await until(lambda: site.engine.scheduler.waiting.num_groups == 1)
        error = await refusal_of(site.run(long))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        worker.may_answer.set()
        await asyncio.gather(*running)
        await site.idle()


async def test_prompt_tokens_on_their_way_through_the_journal_count_as_waiting(store: GatedStore) -> None:
    async with running_site(store, max_queue_tokens=100, admission_timeout_s=60.0) as site:
        await site.add_worker()
        store.may_append.clear()
        long = counting(10)
        long.token_ids.ids[:] = [7] * 60
        entering = asyncio.create_task(site.run(long))
        await until(lambda: len(site.admission.entering) == 1)
        assert site.engine.scheduler.waiting.size() == (0, 0)
        late = asyncio.create_task(refusal_of(site.run(long)))
        await until(lambda: late.done() or len(site.admission.entering) == 2)
        store.may_append.set()
        error = await late
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "60 prompt tokens wait" in (error.details() or "")
        await entering
        await site.run(long)
        await site.idle()


async def test_an_admission_that_the_store_does_not_take_is_refused_and_leaves_its_id_free(
    site: Site, store: GatedStore
) -> None:
    """The admission becomes durable too late; its client has come back with the same id meanwhile."""
    await site.add_worker()
    store.may_append.clear()
    told_to_come_back_soon(await refusal_of(site.run(counting(10, 4, "again"))), "does not answer")
    again = asyncio.create_task(site.run(counting(10, 4, "again")))
    await until(lambda: site.engine.journal.stats.pending == 2)
    store.may_append.set()
    messages = await again
    assert not messages[0].accepted.attached
    assert tokens_in(messages) == [11, 12, 13, 14]
    await site.idle()
    record = await site.inference.GetRequest(pb.GetRequestRequest(request_id="again"))
    assert record.state == pb.REQUEST_STATE_FINISHED
    finishes = [each for _, entry in await entries_of(store) for each in entry.finishes]
    assert {each.sequence: each.state for each in finishes} == {
        1: pb.REQUEST_STATE_CANCELLED,
        2: pb.REQUEST_STATE_FINISHED,
    }
    assert site.engine.num_admitted == 1


async def test_a_store_that_is_away_refuses_new_requests_and_delays_running_ones(site: Site, store: GatedStore) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    running = asyncio.create_task(site.run(counting(10, 4)))
    await until(lambda: bool(worker.steps))
    store.unavailable = True
    worker.may_answer.set()
    await until(lambda: site.engine.journal.stats.degraded)
    told_to_come_back_soon(await refusal_of(site.run(counting(20, 4))), "does not answer")
    num_reading = store.num_reading
    store.may_read.clear()
    told_to_come_back_soon(await refusal_of(site.run(counting(20, 4, "named"))), "does not answer")
    assert store.num_reading == num_reading, "nothing more is asked of a store that does not answer"
    store.may_read.set()
    assert not running.done()
    store.unavailable = False
    assert tokens_in(await running) == [11, 12, 13, 14]
    assert tokens_in(await site.run(counting(20, 4))) == [21, 22, 23, 24]
    await site.idle()


async def test_a_newer_scheduler_on_the_store_is_told_as_unavailable(store: GatedStore) -> None:
    async with running_site(store) as site:
        await site.add_worker()
        store.fenced = True
        told_to_come_back_soon(await refusal_of(site.run(counting(10))), "taken over")
        with pytest.raises(FencedError):
            await site.writing[0]


async def test_a_leader_that_was_followed_does_not_call_a_request_unknown(store: GatedStore) -> None:
    """The old leader has not noticed, since it wrote nothing; it does not know its successor's requests."""
    async with running_site(store) as site:
        await site.add_worker()
        ask = pb.GetRequestRequest(request_id="elsewhere")
        assert await code_of(site.inference.GetRequest(ask)) is grpc.StatusCode.NOT_FOUND
        store.fenced = True
        with pytest.raises(grpc.aio.AioRpcError) as asked:
            await site.inference.GetRequest(ask)
        with pytest.raises(UnavailableError, match="taken over"):
            await site.control.find("elsewhere")
        told_to_come_back_soon(asked.value, "taken over")


async def test_a_leader_that_was_followed_does_not_refuse_a_reader_that_has_more(store: GatedStore) -> None:
    """The reader has more output from the successor, and would take the refusal as final."""
    async with running_site(store) as site:
        await site.add_worker()
        await site.run(counting(10, 4, "r"))
        codes = []
        for positions in ([9], [4, 1]):
            for store.fenced in (False, True):
                with pytest.raises(grpc.aio.AioRpcError) as attached:
                    async for _ in site.inference.Attach(pb.AttachRequest(request_id="r", from_positions=positions)):
                        pass
                codes.append(attached.value.code())
                refusal = await refused_attach(site, pb.Attach(request_id="r", from_positions=positions))
                assert refusal.code == codes[-1].value[0]
        assert codes == [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE] * 2


async def refused_attach(site: Site, attach: pb.Attach) -> pb.Error:
    """Return the error with which a session answers."""
    session = site.inference.Session()
    await session.write(pb.SessionRequest(handle=1, attach=attach))
    response = await session.read()
    assert isinstance(response, pb.SessionResponse)
    session.cancel()
    return response.events[0].error


async def test_closing_the_door_waits_for_those_on_their_way_in(site: Site, store: GatedStore) -> None:
    worker = await site.add_worker()
    store.may_append.clear()
    running = asyncio.create_task(site.run(counting(10, 4, "last")))
    await until(lambda: store.num_waiting == 1)
    closing = asyncio.create_task(site.admission.close())
    await until(lambda: site.admission.closed)
    told_to_come_back_soon(await refusal_of(site.run(counting(20))), "shutting down")
    assert not closing.done()
    store.may_append.set()
    await closing
    assert "last" in site.engine.live or site.engine.num_finished == 1
    assert tokens_in(await running) == [11, 12, 13, 14]
    assert worker.num_streams == 1


async def test_a_client_that_vanishes_while_being_admitted_leaves_a_request_without_a_reader(store: GatedStore) -> None:
    async with running_site(store, grace_s=0.05) as site:
        await site.add_worker()
        store.may_append.clear()
        leaving = asyncio.create_task(site.run(counting(10, 500, "orphan")))
        await until(lambda: store.num_waiting == 1)
        leaving.cancel()
        store.may_append.set()
        await until(lambda: site.engine.num_finished == 1)
        record = await site.inference.GetRequest(pb.GetRequestRequest(request_id="orphan"))
        assert record.state in (pb.REQUEST_STATE_CANCELLED, pb.REQUEST_STATE_FINISHED)
        await site.idle()


async def test_a_call_that_is_given_up_during_admission_counts_as_no_refusal(site: Site, store: GatedStore) -> None:
    await site.add_worker()
    store.may_append.clear()
    submitting = asyncio.create_task(site.admission.submit(counting(10, 4, "r"), None))
    await until(lambda: store.num_waiting == 1)
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert site.admission.num_refused == 0
    store.may_append.set()
    await until(lambda: site.engine.num_finished == 1)


async def test_a_request_that_nobody_comes_to_read_is_cancelled_after_its_grace_period() -> None:
    async with running_site(grace_s=0.05) as site:
        worker = await site.add_worker()
        worker.may_answer.clear()
        await site.admission.submit(counting(10, 500, "orphan"), None)
        await until(lambda: not site.engine.live)
        assert await _state(site, "orphan") == pb.REQUEST_STATE_CANCELLED


async def test_the_model_is_in_use_while_requests_of_an_earlier_scheduler_are_rebuilt(store: GatedStore) -> None:
    async with running_site(store) as site:
        worker = await site.add_worker()
        worker.may_answer.clear()
        await site.admission.submit(counting(10, 500, "old"), None)
        model = site.admission.model
        assert model is not None
    async with running_site(store, epoch=2) as site:
        assert not site.admission.is_in_use
        site.admission.serve_model(model)
        assert not site.engine.live and site.admission.is_in_use
        await until(lambda: "old" in site.engine.live)


async def test_whoever_asks_for_a_request_on_its_way_in_has_no_answer_before_it_is_in(
    site: Site, store: GatedStore
) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    store.may_append.clear()
    coming = asyncio.create_task(site.admission.submit(counting(10, 500, "coming"), None))
    await until(lambda: store.num_waiting == 1)
    asking = asyncio.create_task(site.control.response("coming"))
    attaching = asyncio.create_task(site.control.attach("coming"))
    await site.inference.GetStats(pb.GetStatsRequest())  # meanwhile both have asked
    assert not asking.done() and not attaching.done()
    store.may_append.set()
    _, accepted = await coming
    _, attached = await attaching
    assert (await asking).request_id == "coming"
    assert attached.attached and not accepted.attached
    attached.attached = False
    assert attached == accepted, "who attaches is told what the first was told"


async def test_looking_for_a_request_on_its_way_in_waits_for_it(site: Site, store: GatedStore) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    store.may_append.clear()
    running = asyncio.create_task(site.run(counting(10, 4, "coming")))
    await until(lambda: store.num_waiting == 1)
    looking = asyncio.create_task(_state(site, "coming"))
    cancelling = asyncio.create_task(_cancelled(site, "coming"))
    store.may_append.set()
    assert await looking in (pb.REQUEST_STATE_WAITING, pb.REQUEST_STATE_RUNNING, pb.REQUEST_STATE_CANCELLED)
    assert await cancelling == pb.REQUEST_STATE_CANCELLED
    with pytest.raises(grpc.aio.AioRpcError):
        await running
    worker.may_answer.set()
    await site.idle()


async def _state(site: Site, request_id: str) -> pb.RequestState.ValueType:
    return (await site.inference.GetRequest(pb.GetRequestRequest(request_id=request_id))).state


async def _cancelled(site: Site, request_id: str) -> pb.RequestState.ValueType:
    return (await site.inference.Cancel(pb.CancelRequest(request_id=request_id))).state


async def test_an_unknown_request_is_not_found(site: Site) -> None:
    for call in (_state(site, "nobody"), _cancelled(site, "nobody")):
        assert await code_of(call) is grpc.StatusCode.NOT_FOUND


async def test_a_record_that_cannot_be_read_now_is_unavailable_not_unknown(site: Site, store: GatedStore) -> None:
    store.unavailable = True
    assert await code_of(_state(site, "somebody")) is grpc.StatusCode.UNAVAILABLE


async def test_who_would_wait_too_long_is_told_when_to_come_back_and_comes_in_then() -> None:
    async with running_site(max_queue_wait_s=0.2) as site:
        await site.add_worker(num_seats=1, num_blocks=4000)
        running = asyncio.create_task(site.run(counting(10, 60_000, "long")))
        await until(lambda: "long" in site.engine.live)
        waiting = asyncio.create_task(site.run(counting(20, 2)))
        await until(lambda: site.engine.waits.expected_s(1) > 0.2)
        error = error_of(await refusal_of(site.run(counting(30))))
        assert isinstance(error, OverloadedError)
        assert 0.2 < error.retry_after_s <= 60
        assert "behind 1 that wait" in error.message
        urgent = asyncio.create_task(site.run(counting(40, 2, priority=-1)))  # only what comes before it counts
        await until(lambda: site.engine.scheduler.waiting.num_groups == 2)
        await site.inference.Cancel(pb.CancelRequest(request_id="long"))
        assert tokens_in(await waiting) == [21, 22]
        assert tokens_in(await urgent) == [41, 42]
        assert tokens_in(await site.run(counting(30, 2))) == [31, 32]
        with suppress(grpc.aio.AioRpcError):
            await running
        await site.idle()


async def test_one_that_nobody_can_take_now_keeps_nobody_out() -> None:
    async with running_site(max_queue_wait_s=0.001) as site:
        large = await site.add_worker("large", num_blocks=64, num_seats=4)
        large.may_answer.clear()
        running = asyncio.create_task(site.run(counting(10, 500, "long")))  # 32 blocks
        await until(lambda: "long" in site.engine.live)
        await site.add_worker("small", num_blocks=8, num_seats=4)
        await large.stop()
        await until(lambda: site.engine.scheduler.waiting.num_groups == 1)
        for number in range(4):
            assert tokens_in(await site.run(counting(20 * number, 8))) == list(range(20 * number + 1, 20 * number + 9))
            await asyncio.sleep(0.002)  # longer than the wait that is allowed
        await site.inference.Cancel(pb.CancelRequest(request_id="long"))
        with suppress(grpc.aio.AioRpcError):
            await running
        await site.idle()


async def test_a_deadline_of_any_length_in_the_headers_of_a_call_is_kept_or_as_good_as_none(site: Site) -> None:
    """One of 11,000 years did not fit the journal: the call failed with INTERNAL and a traceback."""
    await site.add_worker()
    body = message(counting(10).SerializeToString())

    def answer(timeout: str) -> str:
        with RawConnection(site.address) as connection:
            call = connection.open_call(GENERATE, grpc_timeout=timeout)
            connection.send(call, body, ends=True)
            return connection.until_ended(call)["grpc-status"]

    for timeout in ("99999999H", "99999999M", "27000H"):
        assert await asyncio.to_thread(answer, timeout) == "0", timeout


async def test_a_timeout_of_any_length_is_kept_or_as_good_as_none(site: Site, store: GatedStore) -> None:
    await site.add_worker()
    for number, timeout_ms in enumerate((2**63 - 1, 60_000, None)):
        assert tokens_in(await site.run(counting(10, 4, f"r{number}", timeout_ms=timeout_ms))) == [11, 12, 13, 14]
    longest, minute, none = await journaled(store)
    year_ns = 365 * 24 * 3600 * 10**9
    assert longest.deadline_unix_ns - longest.arrived_unix_ns > 50 * year_ns
    assert abs(minute.deadline_unix_ns - minute.arrived_unix_ns - 60 * 10**9) < 10**6
    assert not none.HasField("deadline_unix_ns")


@pytest.mark.parametrize(("timeout_s", "timeout_ms"), [(1000, 5_000_000), (5000, 1_000_000), (1000, None)])
async def test_of_the_timeouts_of_a_request_and_of_its_call_the_shorter_counts(
    site: Site, store: GatedStore, timeout_s: int, timeout_ms: int | None
) -> None:
    await site.add_worker()
    await site.run(counting(10, timeout_ms=timeout_ms), timeout=timeout_s)
    (admission,) = await journaled(store)
    assert 900 < (admission.deadline_unix_ns - admission.arrived_unix_ns) / 1e9 < 1100  # gRPC rounds it up


async def test_what_is_journaled_of_a_request_is_all_that_a_new_leader_needs_and_its_prompt_once(
    site: Site, store: GatedStore
) -> None:
    await site.add_worker()
    asked = counting(10, priority=3, tenant="acme")
    asked.stopping.ClearField("max_tokens")
    call = site.inference.Generate(asked)
    accepted = (await anext(aiter(call))).accepted
    call.cancel()
    (admission,) = await journaled(store)
    assert unpack_int32(admission.prompt_token_ids).tolist() == [10]
    assert admission.model_fingerprint == "counting-1"
    asked.ClearField("token_ids")
    asked.request_id, asked.sampling.seed, asked.stopping.max_tokens = (
        accepted.request_id,
        accepted.seed,
        accepted.max_tokens,
    )
    assert admission.request == asked


async def test_a_request_takes_at_most_9_mib_of_the_journal(site: Site, store: GatedStore) -> None:
    """The longest prompt and the longest parameters take as much, so nothing that comes over the wire takes more."""
    await site.add_worker()

    async def submit(name: str, length: int) -> int:
        """Submit with an unknown field of such a length; return the bytes that the journal has of it."""
        asked = counting(10, 4, name)
        asked.sampling.seed = 1
        tag_and_length = b"\xfa\x7f" + bytes(
            [length & 127 | 128, length >> 7 & 127 | 128, length >> 14 & 127 | 128, length >> 21]
        )
        asked.MergeFromString(tag_and_length + bytes(length))
        await site.admission.submit(asked, None)
        return (await journaled(store))[-1].ByteSize()

    most = 9 * 1024 * 1024
    length = 4_000_000
    length += most - await submit("a", length)
    assert await submit("b", length) == most
    with pytest.raises(InvalidRequestError, match=f"{most + 1:,} bytes in the journal: give at most {most:,}"):
        await submit("c", length + 1)


async def test_who_was_refused_takes_no_place_in_the_queue(store: GatedStore) -> None:
    async with running_site(store, max_queue_requests=1, max_queue_tokens=100) as site:
        await site.add_worker()
        for _ in range(3):
            error = await refusal_of(site.run(counting(10, 50_000)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        long = counting(10)
        long.token_ids.ids[:] = [7] * 150  # which may come in only if nothing waits
        assert len(tokens_in(await site.run(long))) == 4
        assert not site.admission.entering


async def test_a_scheduler_that_shuts_down_sends_everybody_elsewhere_although_its_queue_is_full() -> None:
    async with running_site(max_queue_requests=1) as site:
        worker = await site.add_worker(num_seats=1)
        worker.may_answer.clear()
        tasks = [asyncio.create_task(site.run(counting(10, 4, "running")))]
        await until(lambda: bool(worker.steps))
        tasks.append(asyncio.create_task(site.run(counting(10, 4, "waiting"))))
        await until(lambda: site.engine.scheduler.waiting.num_groups == 1)
        await site.admission.close()
        told_to_come_back_soon(await refusal_of(site.run(counting(20))), "shutting down")
        worker.may_answer.set()
        await asyncio.gather(*tasks)


async def test_a_request_whose_prompt_is_tokenised_while_the_door_closes_is_refused(
    site: Site, store: GatedStore
) -> None:
    await site.add_worker()
    site.admission.tokenizer = prompts = GatedPrompts()
    coming = asyncio.create_task(refusal_of(site.run(counting(10))))
    await until(lambda: prompts.num_begun == 1)
    closing = asyncio.create_task(site.admission.close())
    await until(lambda: site.admission.closed)
    assert not closing.done()
    prompts.may_go_on.set()
    told_to_come_back_soon(await coming, "shutting down")
    await closing
    assert await journaled(store) == []


async def test_a_request_whose_prompt_is_tokenised_while_the_store_goes_away_leaves_nothing_for_it(
    site: Site, store: GatedStore
) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    running = asyncio.create_task(site.run(counting(10)))
    await until(lambda: bool(worker.steps))
    site.admission.tokenizer = prompts = GatedPrompts()
    coming = asyncio.create_task(refusal_of(site.run(counting(20))))
    await until(lambda: prompts.num_begun == 1)
    store.unavailable = True
    worker.may_answer.set()
    await until(lambda: site.engine.journal.health.is_degraded)
    prompts.may_go_on.set()
    told_to_come_back_soon(await coming, "does not answer")
    store.unavailable = False
    assert tokens_in(await running) == [11, 12, 13, 14]
    await site.idle()
    assert len(await journaled(store)) == 1


async def test_the_model_is_in_use_from_the_first_moment_of_a_request_to_its_durable_end(
    site: Site, store: GatedStore
) -> None:
    await site.add_worker()
    assert not site.admission.is_in_use
    site.admission.tokenizer = prompts = GatedPrompts()
    running = asyncio.create_task(site.run(counting(10)))
    await until(lambda: prompts.num_begun == 1)
    assert site.admission.is_in_use
    store.may_append.clear()
    prompts.may_go_on.set()
    await until(lambda: store.num_waiting == 1)
    store.may_append.set()  # wakes the admission's append alone
    store.may_append.clear()
    await until(lambda: site.engine.output_tokens == 4)
    assert site.admission.is_in_use
    store.may_append.set()
    await running
    await site.idle()
    assert not site.admission.is_in_use


async def test_a_request_whose_end_is_on_its_way_to_the_journal_is_not_paused(store: GatedStore) -> None:
    async with running_site(store) as site:
        await site.add_worker()
        store.may_append.clear()
        running = asyncio.create_task(site.run(counting(10, 4, "ends")))
        await until(lambda: store.num_waiting == 1)
        store.may_append.set()  # wakes the admission's append alone
        store.may_append.clear()
        await until(lambda: site.engine.output_tokens == 4)
        with pytest.raises(FailedPreconditionError, match="has ended"):
            await site.control.pause("ends", keep_on_host=False)
        with pytest.raises(FailedPreconditionError, match="has ended"):
            await site.control.resume("ends")
        store.may_append.set()
        assert tokens_in(await running) == [11, 12, 13, 14]


async def test_log_probabilities_of_a_prompt_that_fit_into_no_message_are_refused(site: Site) -> None:
    """Regression: they were computed, but fit into no chunk, so the client attached again and again."""
    worker = ScriptedWorker(num_blocks=8000)
    worker.description.model.max_model_len = 120_000
    await site.start_worker(worker)
    request = counting(10, 1)
    request.token_ids.ids.extend([1] * 110_000)
    request.output.prompt_logprobs = 20
    error = await refusal_of(site.run(request))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "output.prompt_logprobs: is 20 for a prompt of 110,001 tokens" in (error.details() or "")
