"""The end of a group whose ranks do not all come to the end of a pass: they are at different places for good."""

from collections.abc import Iterator
from contextlib import contextmanager

from kernels.native.shared_ranks import RankReduction
from worker_svc.steps.step_limits import InvalidStepError, MissingBlocksError
from worker_svc.steps.step_runner import DeviceLostError


@contextmanager
def whole_or_lost(reduction: RankReduction) -> Iterator[None]:
    """Raises DeviceLostError unless all ranks come to the end, or refuse the step, which changes nothing."""
    try:
        yield
    except (InvalidStepError, MissingBlocksError):
        raise
    except Exception as error:
        reduction.fail()
        raise DeviceLostError(f"a pass of the group broke off: {type(error).__name__}: {error}") from error
    if reduction.has_failed:
        raise DeviceLostError("a rank of the group did not come to the end of a pass")
