"""Queue of an executor: who waits for room in it, and what ends with it."""

import asyncio
import threading

import pytest

from common.step import Step, StepResult
from tests.patience import patient
from tests.worker.test_executor import Harness, ScriptedRunner
from worker_svc.steps.executor import MAX_QUEUED_STEPS, StepExecutor
from worker_svc.steps.task_thread import TaskThread


async def test_who_sends_more_steps_than_the_queue_holds_waits_and_draining_waits_for_them_all() -> None:
    harness, may_go, answers = Harness(), threading.Event(), list[StepResult]()

    def wait() -> None:
        assert may_go.wait(patient(20.0))

    harness.runner.on_launch = wait
    steps = [Step(epoch=1, step_id=number, snapshot=number == 1) for number in range(1, MAX_QUEUED_STEPS + 2)]
    for step in steps[:-1]:
        await harness.executor.submit(step, answers.append)
    last = asyncio.create_task(harness.executor.submit(steps[-1], answers.append))
    draining = asyncio.create_task(harness.executor.drain())
    await asyncio.sleep(0.02)
    assert not last.done() and not draining.done()
    may_go.set()
    await draining
    assert len(answers) >= MAX_QUEUED_STEPS
    await last
    await harness.executor.drain()
    assert [each.step_id for each in answers] == [each.step_id for each in steps]
    await harness.executor.close()
    await harness.thread.close()


async def test_closing_waits_for_what_is_queued() -> None:
    thread, runner, answers, may_go = TaskThread("execution"), ScriptedRunner(), list[StepResult](), threading.Event()
    executor = StepExecutor(runner, thread, on_device_lost=pytest.fail)

    def wait() -> None:
        assert may_go.wait(patient(20.0))

    runner.on_launch = wait
    await executor.submit(Step(epoch=1, step_id=1, snapshot=True), answers.append)
    closing = asyncio.create_task(executor.close())
    await asyncio.sleep(0.02)
    assert not closing.done()
    may_go.set()
    await closing
    await thread.close()
    assert [each.step_id for each in answers] == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_the_end_of_the_process_is_no_fault_of_a_step() -> None:
    thread, runner, answers, later = TaskThread("execution"), ScriptedRunner(), list[StepResult](), list[int]()
    executor = StepExecutor(runner, thread, on_device_lost=pytest.fail)
    runner.errors[1] = SystemExit(1)
    await executor.submit(Step(epoch=1, step_id=1, snapshot=True), answers.append)
    thread.submit(lambda: later.append(1))
    await thread.close()
    assert (answers, later) == ([], [])  # it has ended the thread
