"""The work of a rank other than 0 on an accelerator: the steps that rank 0 has got, in its order.

It computes what rank 0 computes, with its part of the model, and answers nothing.
"""

from collections import deque

from common.step import StepResult
from common.step_codec import step_from_pb
from kernels.native.shared_ranks import RankReduction
from quire.v1.worker_pb2 import StepRequest
from worker_svc.ranks.rank_connection import FrameKind, RankConnection, RankLostError
from worker_svc.steps.completion import MAX_LAUNCHED_STEPS
from worker_svc.steps.step_limits import InvalidStepError, MissingBlocksError
from worker_svc.steps.step_runner import PendingStep, StepRunner


class StepFollower:
    """One rank's runner."""

    def __init__(self, runner: StepRunner, reduction: RankReduction) -> None:
        self._runner = runner
        self._reduction = reduction
        self._launched: deque[PendingStep] = deque()

    def serve(self, connection: RankConnection) -> None:
        """Follow rank 0 until it is gone. Raises RankLostError then, or if a rank did not come in time."""
        while True:
            kind, payload = connection.receive()
            if kind is not FrameKind.STEP:
                raise RankLostError(f"a frame {kind.name} came instead of a step")
            self._execute(payload)
            if self._reduction.has_failed:
                raise RankLostError("a rank of the group did not come to the end of a pass")

    def _execute(self, payload: bytes) -> None:
        """Launch a step, and forget the oldest: rank 0, which launches as many at once, has had its end."""
        try:
            launched = self._runner.launch(step_from_pb(StepRequest.FromString(payload)))
        except (InvalidStepError, MissingBlocksError):  # rank 0 refuses it, too
            return
        assert not isinstance(launched, StepResult), "a runner of an accelerator only queues a step"
        self._launched.append(launched)
        if len(self._launched) > MAX_LAUNCHED_STEPS:
            self._launched.popleft().wait()
