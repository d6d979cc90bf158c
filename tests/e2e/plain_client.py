"""A client of generated stubs alone, as of another language, which does what the comments of inference.proto say."""

import asyncio
from dataclasses import dataclass, field

import grpc
from google.rpc import error_details_pb2, status_pb2

from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc

_PAUSE_S = 0.1


@dataclass(slots=True)
class PlainRun:
    """Run of one request, with its results so far."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    is_accepted: bool = False
    finished: pb.Finished | None = None
    num_calls: int = 0


async def generate(places: tuple[str, ...], request: pb.GenerateRequest, run: PlainRun) -> None:
    """Runs one request to its end, whichever scheduler leads. Raises what is final."""
    place = places[0]
    while run.finished is None:
        run.num_calls += 1
        async with grpc.aio.insecure_channel(place) as channel:
            try:
                await _read(channel, request, run)
            except grpc.aio.AioRpcError as error:
                place = _next(error, place, places)
        if run.finished is None:
            await asyncio.sleep(_PAUSE_S)


async def _read(channel: grpc.aio.Channel, request: pb.GenerateRequest, run: PlainRun) -> None:
    stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
    attach = pb.AttachRequest(request_id=request.request_id, from_positions=[len(run.token_ids)])
    async for message in stub.Attach(attach) if run.is_accepted else stub.Generate(request):
        if message.HasField("accepted"):
            run.is_accepted = True
        elif message.HasField("finished"):
            run.finished = message.finished
        else:
            assert message.chunk.position == len(run.token_ids)
            run.token_ids.extend(message.chunk.token_ids)
            run.text += message.chunk.text


def _next(error: grpc.aio.AioRpcError, place: str, places: tuple[str, ...]) -> str:
    """Choose the next place to ask. Raises the error if it is final."""
    others = [each for each in places if each != place]
    is_ours = any(key == "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ())
    if error.code() is grpc.StatusCode.UNAVAILABLE or (error.code() is grpc.StatusCode.CANCELLED and not is_ours):
        return others[0]
    info = error_details_pb2.ErrorInfo()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                detail.Unpack(info)
    if error.code() is not grpc.StatusCode.FAILED_PRECONDITION or info.reason != "NOT_LEADER":
        raise error
    return info.metadata["leader"] if "leader" in info.metadata else others[0]
