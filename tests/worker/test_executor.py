"""Fencing, failures, order and times around a runner."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from itertools import pairwise

import pytest

from common.step import Step, StepResult, StepStatus
from tests.patience import patient
from worker_svc.steps.executor import StepExecutor
from worker_svc.steps.step_limits import InvalidStepError
from worker_svc.steps.task_thread import TaskThread


class ScriptedRunner:
    """Answers each step with its id as its only token, or raises what `errors` holds for that id."""

    def __init__(self) -> None:
        self.executed: list[int] = []
        self.errors: dict[int, BaseException] = {}
        self.on_launch: Callable[[], None] = lambda: None

    def launch(self, step: Step) -> StepResult:
        self.on_launch()
        if step.step_id in self.errors:
            raise self.errors.pop(step.step_id)
        self.executed.append(step.step_id)
        return StepResult(epoch=step.epoch, step_id=step.step_id, token_ids=[step.step_id])


class Harness:
    """An executor, and steps sent to it as on a stream."""

    def __init__(self) -> None:
        self.runner = ScriptedRunner()
        self.thread = TaskThread("execution")
        self.executor = StepExecutor(self.runner, self.thread, on_device_lost=pytest.fail)

    async def send(self, epoch: int, step_id: int, *, snapshot: bool = False) -> StepResult:
        answer: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        await self.executor.submit(Step(epoch=epoch, step_id=step_id, snapshot=snapshot), answer.set_result)
        return await answer

    async def status(self, epoch: int, step_id: int, *, snapshot: bool = False) -> StepStatus:
        return (await self.send(epoch, step_id, snapshot=snapshot)).status


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    harness = Harness()
    yield harness
    await harness.executor.close()
    await harness.thread.close()


async def test_the_first_step_must_be_a_snapshot(harness: Harness) -> None:
    result = await harness.send(1, 1)
    assert result.status is StepStatus.NEED_SNAPSHOT
    assert result.error == "step 1 of epoch 1 builds on a state that this worker does not have"
    assert await harness.status(1, 1, snapshot=True) is StepStatus.OK
    assert harness.runner.executed == [1]


async def test_a_snapshot_starts_a_new_count(harness: Harness) -> None:
    assert await harness.status(1, 40, snapshot=True) is StepStatus.OK
    assert await harness.status(1, 41) is StepStatus.OK
    assert await harness.status(1, 7, snapshot=True) is StepStatus.OK
    assert await harness.status(1, 8) is StepStatus.OK


async def test_the_count_of_a_step_is_known_before_it_writes_any_block_and_that_of_a_refused_one_is_not(
    harness: Harness,
) -> None:
    counts = [harness.executor.progress.count]
    harness.runner.on_launch = lambda: counts.append(harness.executor.progress.count)
    await harness.send(1, 5, snapshot=True)
    await harness.send(1, 6)
    assert await harness.status(1, 9) is StepStatus.NEED_SNAPSHOT
    await harness.send(1, 5, snapshot=True)
    await harness.send(2, 1, snapshot=True)
    assert [count.epoch for count in counts] == [0, 1, 1, 1, 2]
    assert [count is last for last, count in pairwise(counts)] == [False, True, False, False]


@pytest.mark.parametrize("step_id", [1, 2, 4])
async def test_a_step_out_of_turn_needs_a_snapshot_and_changes_nothing(harness: Harness, step_id: int) -> None:
    await harness.send(1, 1, snapshot=True)
    await harness.send(1, 2)
    result = await harness.send(1, step_id)
    assert result.status is StepStatus.NEED_SNAPSHOT
    assert result.error == f"step {step_id} came when step 3 was expected"
    assert await harness.status(1, 3) is StepStatus.OK


async def test_a_lower_epoch_is_stale_and_learns_the_highest(harness: Harness) -> None:
    await harness.send(5, 1, snapshot=True)
    result = await harness.send(4, 2, snapshot=True)
    assert (result.status, result.epoch, result.step_id) == (StepStatus.STALE_EPOCH, 5, 2)
    assert await harness.status(5, 2) is StepStatus.OK


async def test_a_higher_epoch_needs_a_snapshot_and_fences_the_lower_even_so(harness: Harness) -> None:
    await harness.send(5, 1, snapshot=True)
    assert await harness.status(6, 2) is StepStatus.NEED_SNAPSHOT
    assert await harness.status(5, 2) is StepStatus.STALE_EPOCH
    assert await harness.status(6, 1, snapshot=True) is StepStatus.OK


async def test_a_step_that_raises_fails_alone_and_only_a_snapshot_follows(harness: Harness) -> None:
    await harness.send(1, 1, snapshot=True)
    harness.runner.errors[2] = RuntimeError("out of memory")
    result = await harness.send(1, 2)
    assert (result.status, result.error) == (StepStatus.FAILED, "RuntimeError: out of memory")
    assert await harness.status(1, 2) is StepStatus.NEED_SNAPSHOT
    assert await harness.status(1, 3) is StepStatus.NEED_SNAPSHOT
    assert await harness.status(1, 4, snapshot=True) is StepStatus.OK


async def test_an_invalid_step_is_refused_and_its_turn_stays(harness: Harness) -> None:
    await harness.send(1, 1, snapshot=True)
    harness.runner.errors[2] = InvalidStepError("rows[0] names seat 9")
    result = await harness.send(1, 2)
    assert (result.status, result.error) == (StepStatus.INVALID, "rows[0] names seat 9")
    assert await harness.status(1, 3) is StepStatus.NEED_SNAPSHOT
    assert await harness.status(1, 2) is StepStatus.OK


async def test_the_last_single_step_sent_again_is_answered_but_not_executed(harness: Harness) -> None:
    step = Step(epoch=1, step_id=1, snapshot=True)
    first = await harness.executor.answer(step)
    again = await harness.executor.answer(Step(epoch=1, step_id=1, snapshot=True))
    assert (again.status, again.token_ids) == (first.status, first.token_ids)
    assert harness.runner.executed == [1]


async def test_a_failed_single_step_sent_again_stays_failed(harness: Harness) -> None:
    harness.runner.errors[1] = RuntimeError("once")
    step = Step(epoch=1, step_id=1, snapshot=True)
    assert (await harness.executor.answer(step)).status is StepStatus.FAILED
    assert (await harness.executor.answer(step)).status is StepStatus.FAILED
    assert harness.runner.executed == []


async def test_another_step_with_the_same_id_is_no_repetition(harness: Harness) -> None:
    await harness.executor.answer(Step(epoch=1, step_id=1, snapshot=True))
    result = await harness.executor.answer(Step(epoch=1, step_id=1, freed_seats=[3]))
    assert result.status is StepStatus.NEED_SNAPSHOT


async def test_a_repetition_after_a_newer_epoch_is_stale(harness: Harness) -> None:
    step = Step(epoch=1, step_id=1, snapshot=True)
    await harness.executor.answer(step)
    await harness.send(2, 1)
    assert (await harness.executor.answer(step)).status is StepStatus.STALE_EPOCH


async def test_answers_come_in_the_order_of_the_steps(harness: Harness) -> None:
    answers: list[StepResult] = []
    for step_id in range(1, 30):
        await harness.executor.submit(Step(epoch=1, step_id=step_id, snapshot=True), answers.append)
    decided = StepResult(epoch=1, step_id=30, status=StepStatus.INVALID)
    await harness.executor.submit(decided, answers.append)
    await harness.executor.drain()
    assert [answer.step_id for answer in answers] == list(range(1, 31))


async def test_times_of_a_step_add_up(harness: Harness) -> None:
    began_ns = time.perf_counter_ns()
    result = await harness.send(1, 1, snapshot=True)
    assert result.exec_ns > 0 and result.queue_ns > 0
    assert result.queue_ns + result.exec_ns <= result.total_ns <= time.perf_counter_ns() - began_ns
    refused = await harness.send(1, 7)
    assert refused.status is StepStatus.NEED_SNAPSHOT and refused.queue_ns > 0 and refused.exec_ns > 0


async def test_what_blocks_hold_is_known_of_no_earlier_epoch_once_another_is_followed(harness: Harness) -> None:
    await harness.send(1, 1, snapshot=True)
    progress = harness.executor.progress
    count = progress.count
    harness.executor.follow_epoch(5)
    await harness.executor.drain()
    assert progress.count.epoch == 5 and not progress.is_current(count)


async def test_an_exception_of_a_call_reaches_its_caller_and_the_thread_goes_on(harness: Harness) -> None:
    with pytest.raises(ZeroDivisionError):
        await harness.thread.call(lambda: 1 // 0)
    assert await harness.thread.call(lambda: 7) == 7


async def test_no_step_is_executed_of_an_epoch_that_is_known_to_have_been_followed(harness: Harness) -> None:
    """The new leader has registered this worker, and sent it no step yet."""
    assert await harness.status(1, 1, snapshot=True) is StepStatus.OK
    harness.executor.follow_epoch(2)
    answer = await harness.send(1, 2)
    assert (answer.status, answer.epoch) == (StepStatus.STALE_EPOCH, 2)
    assert await harness.status(2, 2) is StepStatus.NEED_SNAPSHOT
    harness.executor.follow_epoch(1)  # heard late
    assert await harness.status(2, 1, snapshot=True) is StepStatus.OK
    assert harness.runner.executed == [1, 1]


class PassingRunner:
    """Notes on the loop, in order, when it prepares a step; the first one waits until another is queued behind it."""

    def __init__(self, seen: list[str]) -> None:
        self.before_pass: Callable[[], None] = lambda: None
        self.is_next_queued = threading.Event()
        self._seen, self._loop = seen, asyncio.get_running_loop()

    def launch(self, step: Step) -> StepResult:
        self._loop.call_soon_threadsafe(self._seen.append, f"prepares {step.step_id}")
        self.before_pass()
        self._loop.call_soon_threadsafe(self._seen.append, f"computes {step.step_id}")
        assert self.is_next_queued.wait(60)
        return StepResult(epoch=step.epoch, step_id=step.step_id)


async def test_an_answer_waits_until_the_step_behind_it_computes_and_no_longer() -> None:
    seen: list[str] = []
    runner, thread = PassingRunner(seen), TaskThread("execution")
    executor = StepExecutor(runner, thread, on_device_lost=pytest.fail)
    is_last_answered = asyncio.Event()

    def answered(result: StepResult) -> None:
        seen.append(f"answers {result.step_id}")
        if result.step_id == 3:
            is_last_answered.set()

    for step_id in (1, 2, 3):
        await executor.submit(Step(epoch=1, step_id=step_id, snapshot=step_id == 1), answered)
    runner.is_next_queued.set()
    await asyncio.wait_for(is_last_answered.wait(), patient(60))  # with nothing behind it, it does not wait
    assert seen == [
        *("prepares 1", "computes 1"),
        *("prepares 2", "answers 1", "computes 2"),
        *("prepares 3", "answers 2", "computes 3"),
        "answers 3",
    ]
    await executor.close()
    await thread.close()


async def test_an_executor_that_closes_answers_what_it_held_back() -> None:
    seen: list[str] = []
    runner, thread = PassingRunner(seen), TaskThread("execution")
    runner.is_next_queued.set()
    executor = StepExecutor(runner, thread, on_device_lost=pytest.fail)
    await executor.submit(Step(epoch=1, step_id=1, snapshot=True), lambda _: seen.append("answers 1"))
    await executor.close()
    assert seen[-1] == "answers 1"
    await thread.close()


async def test_an_executor_that_closes_ends_its_thread() -> None:
    before = set(threading.enumerate())

    def names() -> set[str]:
        return {each.name for each in set(threading.enumerate()) - before} & {"execution", "completion"}

    thread = TaskThread("execution")
    executor = StepExecutor(ScriptedRunner(), thread, on_device_lost=pytest.fail)
    assert names() == {"execution", "completion"}
    await executor.close()
    assert names() == {"execution"}
    await thread.close()
    assert names() == set()


async def test_each_answer_is_told_before_it_is_delivered() -> None:
    told: list[str] = []
    thread = TaskThread("execution")
    executor = StepExecutor(
        ScriptedRunner(),
        thread,
        on_device_lost=pytest.fail,
        on_answer=lambda result: told.append(f"{result.step_id} took {result.total_ns > 0}"),
    )
    await executor.submit(
        Step(epoch=1, step_id=3, snapshot=True), lambda result: told.append(f"{result.step_id} is delivered")
    )
    await executor.close()
    await thread.close()
    assert told == ["3 took True", "3 is delivered"]
