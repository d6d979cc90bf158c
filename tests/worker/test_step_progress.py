"""Waits for a step: they end when it is executed, or never will be."""

import asyncio

import pytest

from common.step import Step, StepResult, StepStatus
from worker_svc.steps.step_progress import StepProgress, StepsReplacedError


def begin(progress: StepProgress, epoch: int, step_id: int, *, snapshot: bool = False) -> None:
    progress.begin_step(Step(epoch=epoch, step_id=step_id, snapshot=snapshot))


def end(progress: StepProgress, epoch: int, step_id: int, status: StepStatus = StepStatus.OK) -> None:
    progress.record_answer(StepResult(epoch=epoch, step_id=step_id, status=status))


async def settled(task: "asyncio.Task[object]") -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return task.done()


async def test_a_step_is_waited_for_until_it_or_a_later_one_is_answered_with_ok() -> None:
    progress = StepProgress()
    begin(progress, 3, 1, snapshot=True)
    end(progress, 3, 1)
    waits = [asyncio.create_task(progress.wait_executed(3, step_id)) for step_id in (0, 1, 2, 3)]
    assert [await settled(wait) for wait in waits] == [True, True, False, False]
    begin(progress, 3, 2)
    end(progress, 3, 2, StepStatus.FAILED)
    assert not await settled(waits[2])
    begin(progress, 3, 3, snapshot=True)
    end(progress, 3, 3)
    assert [await settled(wait) for wait in waits] == [True] * 4
    assert all(progress.is_current(wait.result()) for wait in waits)


@pytest.mark.parametrize(("epoch", "step_id"), [(4, 1), (2, 9), (3, 1), (3, 2)])
async def test_a_snapshot_that_counts_anew_and_another_epoch_end_the_waits(epoch: int, step_id: int) -> None:
    progress = StepProgress()
    epochs: list[int] = []
    progress.on_epoch = epochs.append
    begin(progress, 3, 2, snapshot=True)
    count = progress.count
    wait = asyncio.create_task(progress.wait_executed(3, 9))
    assert not await settled(wait)
    begin(progress, epoch, step_id, snapshot=True)
    assert await settled(wait)
    assert isinstance(wait.exception(), StepsReplacedError)
    assert not progress.is_current(count)
    assert epochs == [3] if epoch == 3 else [3, epoch]


async def test_an_epoch_that_is_followed_before_its_steps_come_ends_them_too() -> None:
    progress = StepProgress()
    begin(progress, 3, 1, snapshot=True)
    wait = asyncio.create_task(progress.wait_executed(3, 9))
    await settled(wait)
    progress.follow_epoch(4)
    assert await settled(wait) and isinstance(wait.exception(), StepsReplacedError)
    with pytest.raises(StepsReplacedError):
        await progress.wait_executed(3, 0)
    progress.follow_epoch(4)
    begin(progress, 4, 1, snapshot=True)
    await progress.wait_executed(4, 0)


async def test_a_step_that_comes_again_counts_on() -> None:
    progress = StepProgress()
    begin(progress, 3, 5, snapshot=True)
    count = progress.count
    begin(progress, 3, 6)
    begin(progress, 3, 6)
    assert progress.is_current(count)


async def test_a_wait_that_is_cancelled_leaves_nothing_behind() -> None:
    progress = StepProgress()
    begin(progress, 3, 1, snapshot=True)
    wait = asyncio.create_task(progress.wait_executed(3, 9))
    await settled(wait)
    wait.cancel()
    assert await settled(wait)
    assert progress.num_waiting == 0
