"""Counts of steps: what a block holds is known within one, so each that begins must be told from the one before."""

import pytest

from common.step import Step
from worker_svc.steps.step_progress import StepProgress


def begin(progress: StepProgress, epoch: int, step_id: int, *, snapshot: bool = False) -> None:
    progress.begin_step(Step(epoch=epoch, step_id=step_id, snapshot=snapshot))


def test_steps_that_rise_or_come_again_and_snapshots_that_rise_are_of_one_count() -> None:
    progress = StepProgress()
    begin(progress, 3, 5, snapshot=True)
    count = progress.count
    assert count.epoch == 3
    for step_id, snapshot in [(6, False), (6, False), (7, True), (8, False), (10, True)]:
        begin(progress, 3, step_id, snapshot=snapshot)
        assert progress.is_current(count)


@pytest.mark.parametrize(("epoch", "step_id"), [(4, 1), (4, 9), (2, 9), (3, 1), (3, 2)])
def test_a_snapshot_that_counts_anew_and_another_epoch_begin_a_count(epoch: int, step_id: int) -> None:
    progress = StepProgress()
    epochs: list[int] = []
    progress.on_epoch = epochs.append
    begin(progress, 3, 2, snapshot=True)
    count = progress.count
    begin(progress, epoch, step_id, snapshot=True)
    assert not progress.is_current(count)
    assert progress.count.epoch == epoch
    assert epochs == [3] if epoch == 3 else [3, epoch]
    count = progress.count
    begin(progress, epoch, step_id + 1)
    assert progress.is_current(count)


def test_an_epoch_that_is_followed_before_its_steps_come_begins_their_count() -> None:
    progress = StepProgress()
    epochs: list[int] = []
    progress.on_epoch = epochs.append
    begin(progress, 3, 7, snapshot=True)
    count = progress.count
    progress.follow_epoch(4)
    assert not progress.is_current(count)
    count = progress.count
    progress.follow_epoch(4)
    begin(progress, 4, 1, snapshot=True)
    assert progress.is_current(count)
    assert epochs == [3, 4]
