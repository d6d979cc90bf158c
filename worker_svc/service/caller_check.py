"""Checks that a caller may send steps, or read blocks."""

import hmac

import grpc

from common.block_reads import has_read_key
from common.step_wire import STEP_KEY
from quire.errors import QuireError
from quire.v1 import worker_pb2 as pb

Context = grpc.aio.ServicerContext[object, object]


class UnknownCallerError(QuireError):
    """The caller is not the scheduler that this worker is registered with, or was not sent by it."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "UNKNOWN_CALLER"


def check_step_key(context: Context, step_key: str) -> None:
    """Raises UnknownCallerError: a stranger's epoch or snapshot would make this worker refuse its scheduler."""
    given = dict(context.invocation_metadata() or ()).get(STEP_KEY, "")
    if step_key and not hmac.compare_digest(str(given).encode(), step_key.encode()):
        raise UnknownCallerError(
            "this worker accepts steps only from the scheduler that it is registered with: to send steps yourself, "
            "start a worker without --scheduler"
        )


def check_read_key(request: pb.ReadBlocksRequest, step_key: str) -> None:
    """Raises UnknownCallerError."""
    if step_key and not has_read_key(request, step_key):
        raise UnknownCallerError("the read_key is not that of this read: the scheduler makes it with the step_key")
