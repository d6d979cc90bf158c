"""The engine between workers and readers: ends of every kind, and faults that must stay with one request."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from common.arrays import pack_float32, pack_int32, unpack_int32
from common.step import Step
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2, worker_pb2
from scheduler_svc.requests.live.engine import MAX_PENDING_BYTES, MAX_PENDING_RECORDS
from scheduler_svc.requests.live.queue_wait import QueueWait
from scheduler_svc.requests.live.wait_estimate import WaitEstimate
from scheduler_svc.workers.worker_link import WorkerLink
from scheduler_svc.workers.worker_loop import WorkerLoop
from tests.patience import patient
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import entries_of, until
from tests.scheduler.refusals import code_of, refusal_of
from tests.scheduler.sample_outputs import sampled
from tests.scheduler.scripted_worker import EOS, Answer, ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in
from tests.scheduler.speaking_site import BAD_TOKEN, make_stumbling


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        yield made


class GatedLink(WorkerLink):
    """A link whose sending takes as long as the test wants."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.may_send = asyncio.Event()
        self.num_waiting = 0

    async def send(self, step: Step) -> None:
        self.num_waiting += 1
        await self.may_send.wait()
        self.num_waiting -= 1
        await super().send(step)


async def test_a_request_may_end_while_its_first_step_is_being_sent(site: Site) -> None:
    worker = await site.add_worker("other")
    await site.workers.close()
    link = GatedLink(worker.address)
    link.open()
    site.engine.scheduler.workers.add_worker("slow", num_blocks=64, block_size=16, num_seats=8)
    await site.inference.GetModel(pb.GetModelRequest())
    driving = asyncio.create_task(
        WorkerLoop("slow", link, site.engine, current_epoch=lambda: 2, send_whole=False).run()
    )
    messages = aiter(site.inference.Generate(counting(10, 4, "brief")))
    await anext(messages)
    await until(lambda: link.num_waiting == 1)
    await site.inference.Cancel(pb.CancelRequest(request_id="brief"))
    await until(lambda: not site.engine.live)
    link.may_send.set()
    assert tokens_in(await site.run(counting(20, 4))) == [21, 22, 23, 24]
    assert not driving.done()
    driving.cancel()
    await asyncio.gather(driving, return_exceptions=True)
    await link.close()
    with pytest.raises(grpc.aio.AioRpcError):
        _ = [message async for message in messages]


async def test_stop_tokens_and_end_of_sequence_end_a_request_with_their_cause(site: Site) -> None:
    await site.add_worker()
    request = counting(10, 20)
    request.stopping.stop_token_ids.append(15)
    messages = await site.run(request)
    assert tokens_in(messages) == [11, 12, 13, 14, 15]
    finish = messages[-2].chunk.finish
    assert (finish.reason, finish.stop_token_id) == (pb.FINISH_REASON_STOP, 15)

    messages = await site.run(counting(EOS - 3, 20))
    assert tokens_in(messages) == [EOS - 2, EOS - 1, EOS]
    assert messages[-2].chunk.finish.eos_token_id == EOS
    await site.idle()


async def test_logits_that_are_not_finite_fail_their_request_and_no_other(site: Site) -> None:
    worker = await site.add_worker()

    def script(request: worker_pb2.StepRequest) -> Answer:
        response = worker.execute(request)
        tokens = [int.from_bytes(response.token_ids[i : i + 4], "little") for i in range(0, len(response.token_ids), 4)]
        response.invalid_samples = b"".join(
            index.to_bytes(4, "little") for index, token in enumerate(tokens) if token in (505, 1001)
        )
        return response

    worker.script = script
    good = [asyncio.create_task(site.run(counting(1000 * i + 2000, 30))) for i in range(4)]
    with pytest.raises(grpc.aio.AioRpcError, match="not finite") as caught:
        await site.run(counting(500, 30, "late"))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    record = await site.inference.GetRequest(pb.GetRequestRequest(request_id="late"))
    assert list(record.samples[0].token_ids) == [501, 502, 503, 504]
    assert record.usage.completion_tokens == 4
    with pytest.raises(grpc.aio.AioRpcError, match="not finite"):
        await site.run(counting(1000, 30))
    for i, messages in enumerate(await asyncio.gather(*good)):
        assert tokens_in(messages) == list(range(1000 * i + 2001, 1000 * i + 2031))
    assert worker.num_streams == 1
    await site.idle()


@pytest.mark.parametrize("stop", [[], ["never said"]])
async def test_a_text_that_cannot_be_made_fails_its_request_and_no_other(site: Site, stop: list[str]) -> None:
    worker = await site.add_worker()
    make_stumbling(site)
    good = asyncio.create_task(site.run(counting(BAD_TOKEN + 1, 30)))
    bad = counting(BAD_TOKEN - 4, 30, "wordless")
    bad.stopping.stop.extend(stop)
    bad.output.logprobs = 0
    with pytest.raises(grpc.aio.AioRpcError, match="could not be made") as caught:
        await site.run(bad)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    record = await site.inference.GetRequest(pb.GetRequestRequest(request_id="wordless"))
    assert list(record.samples[0].token_ids) == [BAD_TOKEN - 3, BAD_TOKEN - 2, BAD_TOKEN - 1]
    assert tokens_in(await good) == list(range(BAD_TOKEN + 2, BAD_TOKEN + 32))
    assert worker.num_streams == 1
    await site.idle()


async def test_logprobs_stand_beside_their_tokens_in_chunks_and_journal(site: Site) -> None:
    worker = await site.add_worker()

    def script(request: worker_pb2.StepRequest) -> Answer:
        response = worker.execute(request)
        for sample in range(len(response.token_ids) // 4):
            token = response.token_ids[4 * sample : 4 * sample + 4]
            rows = worker_pb2.LogprobRows(
                logprobs=bytes(4), ranks=b"\1\0\0\0", num_top=1, top_token_ids=token, top_logprobs=bytes(4)
            )
            response.logprobs.add(sample=sample, rows=rows)
        for state in request.whole:
            rows = worker_pb2.LogprobRows(logprobs=bytes(8), ranks=b"\1\0\0\0\2\0\0\0")
            response.prompt_logprobs.add(seat=state.seat, position=1, rows=rows)
        return response

    worker.script = script
    request = counting(7, 6)
    request.token_ids.ids[:] = [5, 6, 7]
    request.output.logprobs = 1
    request.output.prompt_logprobs = 0
    messages = await site.run(request)
    chunks = [message.chunk for message in messages if message.HasField("chunk")]
    assert [each.token_id for chunk in chunks for each in chunk.logprobs] == tokens_in(messages)
    assert [list(each.top_token_ids) for chunk in chunks for each in chunk.logprobs] == [[8 + i] for i in range(6)]
    assert [(each.token_id, each.rank) for each in chunks[0].prompt_logprobs] == [(6, 1), (7, 2)]
    entries = [entry for _, entry in await entries_of(site.store)]
    assert [each.logprobs.token_id for entry in entries for each in entry.delta_logprobs] == [8, 9, 10, 11, 12, 13]
    assert sum(len(entry.prompt_logprobs) for entry in entries) == 1
    await site.idle()


async def test_a_deadline_ends_a_request_with_what_it_has(site: Site) -> None:
    worker = await site.add_worker()

    def script(request: worker_pb2.StepRequest) -> Answer:
        if len(worker.steps) == 8:
            worker.may_answer.clear()
        return worker.execute(request)

    worker.script = script
    request = counting(10, 500, "late", timeout_ms=round(1000 * patient(1.5)))
    assert await code_of(site.run(request)) is grpc.StatusCode.DEADLINE_EXCEEDED
    record = await site.inference.GetRequest(pb.GetRequestRequest(request_id="late"))
    assert record.state == pb.REQUEST_STATE_EXPIRED
    assert record.samples[0].finish.reason == pb.FINISH_REASON_DEADLINE
    assert list(record.samples[0].token_ids) == list(range(11, 18))  # of seven answered steps
    worker.may_answer.set()
    await site.idle()


async def test_the_moments_of_a_request_follow_one_another(site: Site) -> None:
    await site.add_worker()
    messages = await site.run(counting(10, 4, "timed"))  # by four steps, each of which is a moment of its own
    times = messages[-1].finished.timings
    assert 0 < times.accepted_ns <= times.first_scheduled_ns <= times.first_token_ns < times.finished_ns
    assert (await site.inference.GetRequest(pb.GetRequestRequest(request_id="timed"))).timings == times


@pytest.mark.parametrize("is_search", [False, True])
@pytest.mark.parametrize("is_cut_short", [False, True])
async def test_an_ended_request_says_which_memory_it_had(site: Site, is_search: bool, is_cut_short: bool) -> None:
    worker = await site.add_worker()
    if is_cut_short:
        worker.silence_after(3)
    request = counting(100, 20, "ended")
    if is_search:
        request.beam.beam_width = request.sampling.n = 2
    running = asyncio.create_task(refusal_of(site.run(request)) if is_cut_short else site.run(request))
    if is_cut_short:
        await until(lambda: len(worker.steps) > 3)
        await site.inference.Cancel(pb.CancelRequest(request_id="ended"))
    await running
    record = await site.inference.GetRequest(pb.GetRequestRequest(request_id="ended"))
    assert record.memory.blocks > 0
    worker.speak_again()
    await site.idle()


async def test_an_ended_request_stays_as_it_is(site: Site) -> None:
    await site.add_worker()
    await site.run(counting(10, 2, "done"))
    for _ in range(2):
        answer = await site.inference.Cancel(pb.CancelRequest(request_id="done"))
        assert answer.state == pb.REQUEST_STATE_FINISHED
    assert site.engine.num_finished == 1


async def test_a_waiting_request_is_cancelled_without_any_worker(site: Site) -> None:
    worker = await site.add_worker()
    await worker.stop()
    await until(lambda: not site.workers.members)
    site.engine.scheduler.workers.add_worker("ghost", num_blocks=64, block_size=16, num_seats=8)  # that nobody drives
    messages = aiter(site.inference.Generate(counting(10, 4, "idle")))
    await anext(messages)
    assert (await site.inference.GetRequest(pb.GetRequestRequest(request_id="idle"))).state == pb.REQUEST_STATE_WAITING
    await site.inference.Cancel(pb.CancelRequest(request_id="idle"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [message async for message in messages]
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    await site.idle()


async def test_prompt_logprobs_are_whole_though_a_worker_was_lost_among_them(site: Site) -> None:
    """The first worker computes the prompt in pieces of 16 tokens and dies, the second in pieces of 10."""

    def telling(worker: ScriptedWorker, chunk: int) -> None:
        worker.description.max_batched_tokens = chunk

        def script(request: worker_pb2.StepRequest) -> Answer:
            response = worker.execute(request)
            start = (len(worker.steps) - 1) * chunk
            if start < 39:
                num_rows = min(start + chunk, 39) - start
                rows = worker_pb2.LogprobRows(
                    logprobs=pack_float32(-float(i) for i in range(start + 1, start + 1 + num_rows)),
                    ranks=pack_int32([1] * num_rows),
                )
                seat = unpack_int32(request.rows)[0]
                response.prompt_logprobs.add(seat=seat, position=start + 1, rows=rows)
            if worker is first and len(worker.steps) == 2:
                worker.may_answer.clear()
            return response

        worker.script = script

    first, second = ScriptedWorker("first"), ScriptedWorker("second")
    telling(first, 16)
    telling(second, 10)
    await site.start_worker(first)
    request = counting(0, 3)
    request.token_ids.ids[:] = range(1000, 1040)
    request.output.prompt_logprobs = 0
    running = asyncio.create_task(site.run(request))
    await until(lambda: len(first.steps) == 2)
    await first.stop()
    await until(lambda: not site.workers.members)
    await site.start_worker(second)
    messages = await running
    found = [each for message in messages for each in message.chunk.prompt_logprobs]
    assert [each.token_id for each in found] == list(range(1001, 1040))
    assert [each.logprob for each in found] == [-float(i) for i in range(1, 40)]
    await site.idle()


async def test_a_request_whose_end_is_not_durable_yet_is_running_not_waiting() -> None:
    store = GatedStore()
    async with running_site(store) as site:
        worker = await site.add_worker()
        worker.may_answer.clear()
        running = asyncio.create_task(site.run(counting(10, 3, "short")))
        await until(lambda: bool(worker.steps))
        live = site.engine.live["short"]
        store.may_append.clear()
        worker.may_answer.set()
        await until(lambda: live.ended_state is not None)
        record = await site.inference.GetRequest(pb.GetRequestRequest(request_id="short"))
        assert record.state == pb.REQUEST_STATE_RUNNING
        store.may_append.set()
        assert tokens_in(await running) == [11, 12, 13]


async def test_a_store_that_does_not_keep_up_holds_the_workers_back() -> None:
    store = GatedStore()
    async with running_site(store) as site:
        worker = await site.add_worker()
        running = asyncio.create_task(site.run(counting(10, 200)))
        await until(lambda: len(worker.steps) > 5)
        store.may_append.clear()
        pending = site.journal.stats.pending
        many = [7] * MAX_PENDING_RECORDS
        site.journal.append(sequences=many, tokens=many, on_durable=lambda: None)
        num_steps = len(worker.steps)
        for _ in range(50):
            await asyncio.sleep(0.002)
        assert len(worker.steps) <= num_steps + 2, "those in flight, and no more"
        assert site.journal.stats.pending <= pending + MAX_PENDING_RECORDS + 4
        store.may_append.set()
        assert tokens_in(await running) == list(range(11, 211))
        await site.idle()


async def test_the_journal_is_behind_from_a_number_of_records_on() -> None:
    store = GatedStore()
    async with running_site(store) as site:
        store.may_append.clear()
        many = [7] * (MAX_PENDING_RECORDS - site.journal.num_pending - 1)
        site.journal.append(sequences=many, tokens=many, on_durable=lambda: None)
        assert site.engine.may_step()
        site.journal.append(sequences=[7], tokens=[7], on_durable=lambda: None)
        assert site.journal.num_pending == MAX_PENDING_RECORDS
        assert not site.engine.may_step()
        store.may_append.set()
        await until(site.engine.may_step)


async def test_workers_are_woken_when_there_may_be_work_for_them_and_not_by_every_acknowledgement() -> None:
    store = GatedStore()
    async with running_site(store) as site:
        await site.add_worker()
        site.engine.scheduler.workers.remove_worker("w1")  # nobody computes anything
        await site.workers.close()
        wakes: list[str] = []

        def wake() -> None:
            wakes.append("woken")

        def num_wakes() -> int:
            number = len(wakes)
            wakes.clear()
            return number

        site.engine.add_waker(wake)
        readings = [asyncio.create_task(refusal_of(site.run(counting(10, 4, each)))) for each in ("first", "second")]
        await until(lambda: len(site.engine.live) == 2)
        assert num_wakes() >= 2, "there is something to compute"
        first, second = site.engine.live["first"], site.engine.live["second"]
        await site.engine.pause(first, keep_on_host=False)
        assert num_wakes() == 1, "its blocks may let others run"
        await site.engine.resume(first)
        assert num_wakes() == 1, "it may run again"
        site.engine.end(first, pb.REQUEST_STATE_CANCELLED)
        assert num_wakes() == 1, "its blocks may let others run"
        await first.until_closed()
        assert num_wakes() == 0, "nobody was held back"
        site.engine.remove_waker(wake)
        site.engine.end(second, pb.REQUEST_STATE_CANCELLED)
        await second.until_closed()
        assert num_wakes() == 0, "nobody is there to be woken"
        await asyncio.gather(*readings)


async def test_who_was_held_back_is_woken_when_the_journal_has_caught_up() -> None:
    store = GatedStore()
    async with running_site(store) as site:
        worker = await site.add_worker()
        worker.may_answer.clear()
        reading = asyncio.create_task(refusal_of(site.run(counting(10, 4, "first"))))
        await until(lambda: "first" in site.engine.live)
        store.may_append.clear()
        heavy = journal_pb2.BeamStep(sequence=1000, token_ids=bytes(MAX_PENDING_BYTES))
        site.journal.append(sequences=(), tokens=(), beam_steps=[heavy], on_durable=lambda: None)
        assert not site.engine.may_step()
        live = site.engine.live["first"]
        site.engine.end(live, pb.REQUEST_STATE_CANCELLED)
        woken = asyncio.Event()
        site.engine.add_waker(woken.set)
        store.may_append.set()
        await asyncio.wait_for(woken.wait(), patient(20))
        assert site.engine.may_step()
        worker.may_answer.set()
        await reading


async def test_who_was_held_back_is_woken_also_if_another_asks_first_or_nothing_of_a_request_was_pending() -> None:
    store = GatedStore()
    async with running_site(store) as site:
        store.may_append.clear()
        heavy = journal_pb2.BeamStep(sequence=1000, token_ids=bytes(MAX_PENDING_BYTES))
        site.journal.append(beam_steps=[heavy], on_durable=lambda: asked.append(site.engine.may_step()))
        asked = [site.engine.may_step()]
        woken = asyncio.Event()
        site.engine.add_waker(woken.set)
        store.may_append.set()
        await asyncio.wait_for(woken.wait(), patient(20))
        assert asked == [False, True], "the second is another worker's loop, which goes on"
        woken.clear()
        site.journal.append(sequences=[7], tokens=[7], on_durable=lambda: None)
        await until(lambda: not site.journal.num_pending)
        assert not woken.is_set(), "each is woken once"


async def test_who_shuts_down_waits_for_nobody_or_for_those_that_are_there(site: Site) -> None:
    await asyncio.wait_for(site.engine.wait_until_empty(), patient(5))
    worker = await site.add_worker()
    worker.may_answer.clear()
    running = asyncio.create_task(site.run(counting(10, 4)))
    await until(lambda: bool(site.engine.live))
    empty = asyncio.create_task(site.engine.wait_until_empty())
    await asyncio.sleep(0)
    assert not empty.done()
    worker.may_answer.set()
    await running
    await until(empty.done)


async def test_whatever_was_to_end_a_request_later_lets_go_of_it_at_its_end(site: Site) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    running = asyncio.create_task(site.run(counting(10, 4, "timed", timeout_ms=3_600_000)))
    call = site.inference.Generate(counting(10, 4, "left", timeout_ms=3_600_000))
    await anext(aiter(call))
    call.cancel()
    await until(lambda: "timed" in site.engine.live)
    timed, left = site.engine.live["timed"], site.engine.live["left"]
    await until(lambda: left.abandonment is not None)
    worker.may_answer.set()
    assert tokens_in(await running) == [11, 12, 13, 14]
    await site.idle()
    for timer in (timed.deadline, left.deadline, left.abandonment):
        assert timer is not None and timer.cancelled()


class NotedEnds(WaitEstimate):
    """Remembers the ends from which it estimates."""

    ends: list[tuple[int, int]]

    def record_end(self, num_output_tokens: int, max_tokens: int) -> None:
        self.ends.append((num_output_tokens, max_tokens))
        super().record_end(num_output_tokens, max_tokens)


async def test_waits_are_estimated_from_the_longest_sample_of_each_request_that_had_output(site: Site) -> None:
    """Stop token 12 behind 0 ends the samples after 12, 6 and 4 tokens."""
    worker = await site.add_worker()
    waits = NotedEnds(site.engine.scheduler)
    waits.ends = []
    site.engine.waits = waits
    for order in (0, 1):
        request = sampled(0, 14, 2, first_sample_index=order)
        request.stopping.stop_token_ids.append(12)
        await site.run(request)
    worker.may_answer.clear()
    early = asyncio.create_task(refusal_of(site.run(counting(10, 4, "early"))))
    await until(lambda: "early" in site.engine.live)
    await site.inference.Cancel(pb.CancelRequest(request_id="early"))
    await early
    worker.may_answer.set()
    assert waits.ends == [(12, 14), (6, 14)]


async def refused_in_the_end(
    poison: "asyncio.Task[grpc.aio.AioRpcError]", site: Site, worker: ScriptedWorker
) -> grpc.aio.AioRpcError:
    """The error of a request that ends the worker's link again and again; the worker comes back each time."""
    while not poison.done():
        await site.cluster.Register(worker.registration())
        await asyncio.sleep(0.005)
    return await poison


async def test_a_request_that_breaks_the_loop_again_and_again_is_failed_and_the_service_goes_on() -> None:
    async with running_site(pipeline_depth=1) as site:
        worker = await site.add_worker()
        worker.may_answer.clear()
        first = asyncio.create_task(refusal_of(site.run(counting(10, 3, "first"))))
        await until(lambda: len(worker.steps) == 1)
        poison = asyncio.create_task(refusal_of(site.run(counting(20, 3, "poison"))))
        await until(lambda: "poison" in site.engine.live)
        site.engine.sampling_of[site.engine.live["poison"].number] = None  # type: ignore[assignment]
        await site.inference.Cancel(pb.CancelRequest(request_id="first"))
        await first
        worker.may_answer.set()
        error = await refused_in_the_end(poison, site, worker)
        assert error.code() is grpc.StatusCode.INTERNAL and "AttributeError in the scheduler" in (error.details() or "")
        await site.register(worker)
        assert tokens_in(await site.run(counting(30, 3))) == [31, 32, 33]
        await site.idle()


async def test_a_search_whose_results_cannot_be_taken_is_failed_and_the_service_goes_on() -> None:
    async with running_site(pipeline_depth=1) as site:
        worker = await site.add_worker()
        worker.may_answer.clear()
        request = counting(20, 30, "poison")
        request.beam.beam_width = 2
        poison = asyncio.create_task(refusal_of(site.run(request)))
        await until(lambda: "poison" in site.engine.live)
        site.engine.live["poison"].beams = None
        worker.may_answer.set()
        error = await refused_in_the_end(poison, site, worker)
        assert error.code() is grpc.StatusCode.INTERNAL and "AssertionError in the scheduler" in (error.details() or "")
        await site.register(worker)
        assert tokens_in(await site.run(counting(30, 3))) == [31, 32, 33]
        await site.idle()


async def test_nothing_is_left_of_requests_however_they_end(site: Site) -> None:
    worker = await site.add_worker()
    await site.run(counting(10, 3, "warm-up"))
    tasks_before = len(asyncio.all_tasks())

    async def one(number: int) -> None:
        match number % 5:
            case 0:
                await site.run(counting(number, 5))
            case 1:
                await refusal_of(site.run(counting(number, 500, f"r{number}", timeout_ms=20)))
            case 2:
                await refusal_of(site.run(pb.GenerateRequest()))
                told = counting(number, 3)
                told.output.logprobs = 0
                await site.run(told)
            case 3:
                messages = aiter(site.inference.Generate(counting(number, 500, f"r{number}")))
                await anext(messages)
                await site.inference.Cancel(pb.CancelRequest(request_id=f"r{number}"))
                with pytest.raises(grpc.aio.AioRpcError):
                    _ = [message async for message in messages]
            case 4:
                await asyncio.gather(*(site.run(counting(number, 5, f"r{number}")) for _ in range(2)))

    await asyncio.gather(*(one(number) for number in range(200)))
    await site.idle()
    await until(lambda: site.records.num_pending == 0)
    await until(lambda: len(asyncio.all_tasks()) <= tasks_before)
    assert not site.admission.is_in_use
    assert not site.journal.stats.num_needed
    engine = site.engine
    assert not (engine._request_of or engine._sample_of or engine._appended or engine._with_stop_strings)
    assert not engine._with_logprobs
    assert not (engine._publisher._unsettled or engine._publisher._ended)
    assert worker.num_streams == 1


class SpoiltWait(QueueWait):
    """Fails by an error of the kind that unsuitable arguments raise."""

    def record_step(self, now_s: float, num_served: int, num_waiting: int) -> None:
        raise ValueError("spoilt")


async def test_a_value_error_of_our_own_is_not_taken_for_the_workers_doing() -> None:
    async with running_site() as site:
        worker = await site.add_worker()
        site.engine.waits.queue_wait = SpoiltWait()
        poison = asyncio.create_task(refusal_of(site.run(counting(20, 3, "poison"))))
        error = await refused_in_the_end(poison, site, worker)
        assert "in 3 attempts, the last while running alone: ValueError in the scheduler" in (error.details() or "")
        site.engine.waits.queue_wait = QueueWait()
        await site.register(worker)
        assert tokens_in(await site.run(counting(30, 3))) == [31, 32, 33]
        await site.idle()
