"""Steps that are launched and not done: what overlaps, in which order answers come, and what a failure spoils."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import pytest

from common.step import Step, StepResult, StepStatus
from worker_svc.steps.completion import MAX_LAUNCHED_STEPS
from worker_svc.steps.executor import StepExecutor
from worker_svc.steps.step_limits import InvalidStepError
from worker_svc.steps.step_runner import DeviceLostError, PendingStep, result_of
from worker_svc.steps.task_thread import TaskThread

OK, FAILED, INVALID, NEED_SNAPSHOT = StepStatus.OK, StepStatus.FAILED, StepStatus.INVALID, StepStatus.NEED_SNAPSHOT


class Device:
    """A runner whose steps are done when the test says so; a step's token is its id."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.launch_errors: dict[int, Exception] = {}
        self.wait_errors: dict[int, Exception] = {}
        self.done_at_once: set[int] = set()
        self.finished: dict[int, threading.Event] = {}
        self.num_unfinished = self.most_unfinished = 0
        self._launched = threading.Semaphore(0)

    def launch(self, step: Step) -> StepResult | PendingStep:
        self.events.append(f"launch {step.step_id}")
        self._launched.release()
        if step.step_id in self.launch_errors:
            raise self.launch_errors.pop(step.step_id)
        pending = Pending(self, step, self.finished.setdefault(step.step_id, threading.Event()))
        if step.step_id in self.done_at_once:
            return pending.result()
        self.num_unfinished += 1
        self.most_unfinished = max(self.most_unfinished, self.num_unfinished)
        return pending

    def finish(self, *step_ids: int) -> None:
        for step_id in step_ids:
            self.finished.setdefault(step_id, threading.Event()).set()

    async def has_launched(self, count: int) -> None:
        """Waits for as many launches more."""
        for _ in range(count):
            assert await asyncio.to_thread(self._launched.acquire, timeout=30)


class Pending:
    """A step on the device."""

    def __init__(self, device: Device, step: Step, finished: threading.Event) -> None:
        self._device = device
        self._step = step
        self._finished = finished

    def wait(self) -> StepResult:
        assert self._finished.wait(30)
        self._device.num_unfinished -= 1
        self._device.events.append(f"done {self._step.step_id}")
        if self._step.step_id in self._device.wait_errors:
            raise self._device.wait_errors.pop(self._step.step_id)
        return self.result()

    def result(self) -> StepResult:
        return StepResult(epoch=self._step.epoch, step_id=self._step.step_id, token_ids=[self._step.step_id])


class Harness:
    """An executor before that device."""

    def __init__(self) -> None:
        self.device = Device()
        self.thread = TaskThread("execution")
        self.num_abandoned = 0
        self.executor = StepExecutor(self.device, self.thread, self._abandon)
        self.answered: list[int] = []

    async def send(self, step_id: int, *, snapshot: bool = False) -> asyncio.Future[StepResult]:
        answer: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()

        def deliver(result: StepResult) -> None:
            self.answered.append(result.step_id)
            answer.set_result(result)

        await self.executor.submit(Step(epoch=1, step_id=step_id, snapshot=snapshot), deliver)
        return answer

    def _abandon(self) -> None:
        self.num_abandoned += 1

    async def launch(self, *step_ids: int) -> list[asyncio.Future[StepResult]]:
        """Sends steps, the first as a snapshot, and waits until all are launched."""
        answers = [await self.send(step_id, snapshot=step_id == step_ids[0]) for step_id in step_ids]
        await self.device.has_launched(len(step_ids))
        return answers


async def statuses(answers: list[asyncio.Future[StepResult]]) -> list[StepStatus]:
    return [(await answer).status for answer in answers]


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    harness = Harness()
    yield harness
    await harness.executor.close()
    await harness.thread.close()


async def test_the_next_step_is_launched_before_the_one_before_is_done(harness: Harness) -> None:
    answers = await harness.launch(1, 2)
    assert harness.device.events == ["launch 1", "launch 2"]
    assert harness.answered == []
    harness.device.finish(1)
    assert (await answers[0]).token_ids == [1]
    assert harness.answered == [1]
    harness.device.finish(2)
    assert (await answers[1]).token_ids == [2]


async def test_answers_come_in_the_order_of_the_steps_though_some_are_known_at_once(harness: Harness) -> None:
    harness.device.done_at_once = {2}
    harness.device.launch_errors[3] = InvalidStepError("rows[0] names seat 9")
    answers = await harness.launch(1, 2)
    invalid, refused = await harness.send(3), await harness.send(7)
    decided = StepResult(epoch=1, step_id=8, status=INVALID)
    await harness.executor.submit(decided, lambda result: harness.answered.append(result.step_id))
    await harness.device.has_launched(1)
    assert harness.answered == []
    harness.device.finish(1)
    await harness.executor.drain()
    assert harness.answered == [1, 2, 3, 7, 8]
    assert await statuses([*answers, invalid, refused]) == [OK, OK, INVALID, NEED_SNAPSHOT]


async def test_a_runner_has_no_more_than_a_few_steps_that_are_not_done(harness: Harness) -> None:
    answers = [await harness.send(step_id, snapshot=step_id == 1) for step_id in range(1, 9)]
    for step_id in range(1, 9):
        await harness.device.has_launched(1)
        if step_id >= MAX_LAUNCHED_STEPS:
            harness.device.finish(step_id - MAX_LAUNCHED_STEPS + 1)
    harness.device.finish(*range(1, 9))
    assert await statuses(answers) == [OK] * 8
    assert harness.device.most_unfinished == MAX_LAUNCHED_STEPS


async def test_a_step_that_breaks_off_on_the_device_spoils_those_launched_behind_it(harness: Harness) -> None:
    harness.device.wait_errors[2] = RuntimeError("illegal memory access")
    answers = await harness.launch(1, 2, 3)
    harness.device.finish(1, 2, 3)
    assert await statuses(answers) == [OK, FAILED, NEED_SNAPSHOT]
    assert (await answers[1]).error == "RuntimeError: illegal memory access"
    assert (await answers[2]).error == "step 3 of epoch 1 was launched behind one that failed"
    assert harness.device.events[-1] == "done 3"  # it was waited for
    assert await statuses([await harness.send(4)]) == [NEED_SNAPSHOT]
    assert harness.device.events[-1] == "done 3"  # and that was refused at once
    harness.device.finish(5, 6)
    assert await statuses([await harness.send(5, snapshot=True), await harness.send(6)]) == [OK, OK]


async def test_once_a_failure_is_known_nothing_is_launched_before_the_device_is_quiet(harness: Harness) -> None:
    harness.device.wait_errors[1] = RuntimeError("broken")
    answers = await harness.launch(1, 2)
    harness.device.finish(1)
    assert (await answers[0]).status is FAILED
    snapshot = await harness.send(3, snapshot=True)
    harness.device.finish(2, 3)
    assert await statuses([*answers, snapshot]) == [FAILED, NEED_SNAPSHOT, OK]
    assert harness.device.events == ["launch 1", "launch 2", "done 1", "done 2", "launch 3", "done 3"]


async def test_whatever_became_of_a_step_behind_a_failed_one_it_needs_a_snapshot(harness: Harness) -> None:
    harness.device.wait_errors = {1: RuntimeError("broken"), 2: RuntimeError("broken, too")}
    harness.device.launch_errors = {3: RuntimeError("broken, as well")}
    answers = await harness.launch(1, 2, 3)
    harness.device.finish(1, 2)
    assert await statuses(answers) == [FAILED, NEED_SNAPSHOT, NEED_SNAPSHOT]

    harness.device.wait_errors = {4: RuntimeError("broken")}
    harness.device.done_at_once = {5}
    answers = await harness.launch(4, 5)
    harness.device.finish(4)
    assert await statuses(answers) == [FAILED, NEED_SNAPSHOT]


async def test_a_step_that_cannot_be_launched_leaves_the_one_before_as_it_is(harness: Harness) -> None:
    harness.device.launch_errors = {2: RuntimeError("out of memory")}
    answers = await harness.launch(1, 2)
    behind = await harness.send(3)
    snapshot = await harness.send(4, snapshot=True)
    await harness.device.has_launched(1)  # it waits for nothing
    harness.device.finish(1, 4)
    assert await statuses([*answers, behind, snapshot]) == [OK, FAILED, NEED_SNAPSHOT, OK]
    assert (await answers[1]).error == "RuntimeError: out of memory"


async def test_an_invalid_step_keeps_its_turn_while_others_are_on_the_device(harness: Harness) -> None:
    harness.device.launch_errors = {2: InvalidStepError("rows[0] names seat 9")}
    answers = [*await harness.launch(1, 2), await harness.send(2)]
    harness.device.finish(1, 2)
    assert await statuses(answers) == [OK, INVALID, OK]


async def test_a_single_step_sent_again_before_it_is_done_is_launched_once(harness: Harness) -> None:
    step = Step(epoch=1, step_id=1, snapshot=True)
    both = asyncio.gather(harness.executor.answer(step), harness.executor.answer(step))
    await harness.device.has_launched(1)
    harness.device.finish(1)
    first, again = await both
    third = await harness.executor.answer(step)
    assert [first.token_ids, again.token_ids, third.token_ids] == [[1]] * 3
    assert harness.device.events == ["launch 1", "done 1"]


async def test_a_single_step_that_broke_off_on_the_device_stays_failed(harness: Harness) -> None:
    harness.device.wait_errors[1] = RuntimeError("broken")
    step = Step(epoch=1, step_id=1, snapshot=True)
    both = asyncio.gather(harness.executor.answer(step), harness.executor.answer(step))
    harness.device.finish(1)
    assert [answer.status for answer in await both] == [FAILED, FAILED]
    assert (await harness.executor.answer(step)).status is FAILED
    assert harness.device.events == ["launch 1", "done 1"]


async def test_a_single_step_that_another_has_spoilt_is_executed_when_sent_again(harness: Harness) -> None:
    harness.device.wait_errors[1] = RuntimeError("broken")
    await harness.launch(1)
    step = Step(epoch=1, step_id=2, snapshot=True)
    spoilt = asyncio.create_task(harness.executor.answer(step))
    await harness.device.has_launched(1)
    harness.device.finish(1, 2)
    assert (await spoilt).status is NEED_SNAPSHOT
    assert (await harness.executor.answer(step)).status is OK


async def test_draining_waits_for_what_is_on_the_device(harness: Harness) -> None:
    answers = await harness.launch(1, 2)
    draining = asyncio.create_task(harness.executor.drain())
    harness.device.finish(1)
    await answers[0]
    await harness.thread.call(lambda: None)  # what the executor does by itself is done
    await asyncio.sleep(0.05)
    assert not draining.done()
    harness.device.finish(2)
    await draining
    assert harness.answered == [1, 2]


async def test_the_times_of_steps_that_overlap_do_not(harness: Harness) -> None:
    began_ns = time.perf_counter_ns()
    answers = await harness.launch(1, 2)
    harness.device.finish(1)
    first = await answers[0]
    harness.device.finish(2)
    second = await answers[1]
    elapsed_ns = time.perf_counter_ns() - began_ns
    assert min(first.exec_ns, second.exec_ns, second.queue_ns) > 0
    assert first.exec_ns + second.exec_ns <= elapsed_ns
    for result in (first, second):
        assert result.queue_ns + result.exec_ns <= result.total_ns


def test_a_result_is_itself_or_waited_for() -> None:
    device = Device()
    device.finish(1)
    device.done_at_once = {2}
    launched = [device.launch(Step(epoch=1, step_id=step_id)) for step_id in (1, 2)]
    assert [result_of(each).token_ids for each in launched] == [[1], [2]]


async def test_a_process_whose_device_is_lost_is_abandoned_whoever_finds_out(harness: Harness) -> None:
    harness.device.wait_errors[1] = DeviceLostError("illegal access")
    harness.device.launch_errors[2] = DeviceLostError("illegal access")
    harness.device.wait_errors[4] = RuntimeError("short of memory")
    answers = await harness.launch(1, 2)
    harness.device.finish(1)
    assert (await answers[0]).status is FAILED
    assert (await answers[1]).status in (FAILED, NEED_SNAPSHOT)
    assert harness.num_abandoned == 2
    answers = await harness.launch(4)
    harness.device.finish(4)
    assert await statuses(answers) == [FAILED]
    assert harness.num_abandoned == 2
