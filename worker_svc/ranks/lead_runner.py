"""Rank 0's runner of an accelerator: it tells the other ranks each step, and then executes it as they do.

Every rank gets the step as the scheduler said it, keeps seats of its own, and samples from the joined logits. So
sampled tokens stay on each device, no rank waits for another one's host, and nothing but sums and columns is exchanged.
Joined logits have the same bits on all ranks, and so tokens are the same. Steps that raise end the group.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from common.step import Step, StepResult
from kernels.native.shared_ranks import RankReduction
from worker_svc.gpu.runner import DeviceRunner, PendingDeviceStep
from worker_svc.ranks.rank_group import RankGroup
from worker_svc.ranks.whole_pass import whole_or_lost


class UnendedSteps:
    """Steps that were begun and have not ended. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_begun = 0
        self._seen_s = 0.0  # when the last one ended, or the first one of those that run began

    def begin(self) -> None:
        """Count a step."""
        with self._lock:
            if not self._num_begun:
                self._seen_s = time.monotonic()
            self._num_begun += 1

    def end(self) -> None:
        """Count the end of the oldest step."""
        with self._lock:
            self._num_begun -= 1
            self._seen_s = time.monotonic()

    def waited_s(self) -> float:
        """Seconds in which no step has ended, though at least one runs; 0 if none does."""
        with self._lock:
            return time.monotonic() - self._seen_s if self._num_begun else 0.0


class LeadRunner:
    """A runner of which rank 0 executes its part."""

    def __init__(self, runner: DeviceRunner, group: RankGroup, reduction: RankReduction) -> None:
        self.unended = UnendedSteps()
        self.reduction = reduction
        self._runner = runner
        self._group = group

    @property
    def graph_passes(self) -> Mapping[str, int]:
        """See PassCountingRunner."""
        return self._runner.graph_passes

    @property
    def kernel_passes(self) -> Mapping[str, int]:
        """See PassCountingRunner."""
        return self._runner.kernel_passes

    def launch(self, step: Step) -> "PendingLeadStep":
        """See DeviceRunner.launch. A step that is refused is refused by every rank, with nothing changed."""
        self.unended.begin()
        try:
            with whole_or_lost(self.reduction):
                self._group.begin_step(step)
                return PendingLeadStep(self._runner.launch(step), self)
        except BaseException:
            self.unended.end()
            raise


@dataclass(frozen=True, slots=True)
class PendingLeadStep:
    """A queued step of a group. A `PendingStep`."""

    pending: PendingDeviceStep
    lead: LeadRunner

    def wait(self) -> StepResult:
        """See PendingDeviceStep.wait."""
        try:
            with whole_or_lost(self.lead.reduction):
                return self.pending.wait()
        finally:
            self.lead.unended.end()
