"""Two worker processes and a client of both that has blocks of one fetched by the other."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from common.arrays import pack_int32
from common.rpc import CLUSTER_MESSAGE_BYTES
from common.step import Step, StepResult
from common.step_codec import result_from_pb, step_to_pb
from quire.rpc import channel_options
from quire.v1 import worker_pb2 as pb
from quire.v1 import worker_pb2_grpc
from tests.services import Service

EPOCH = 5


class WorkerClient:
    """Client of one worker, which counts its steps."""

    def __init__(self, channel: grpc.aio.Channel, address: str, incarnation: str = "") -> None:
        self.address = address
        self.incarnation = incarnation
        self.stub: Any = worker_pb2_grpc.WorkerStub(channel)
        self.step_id = 0

    async def describe(self) -> pb.DescribeResponse:
        answer: pb.DescribeResponse = await self.stub.Describe(pb.DescribeRequest())
        self.incarnation = answer.incarnation
        return answer

    async def step(self, **fields: Any) -> StepResult:
        self.step_id += 1
        step = Step(epoch=EPOCH, step_id=self.step_id, **fields)
        return result_from_pb(await self.stub.Step(step_to_pb(step)))

    def fetch(self, source: "WorkerClient", block_ids: list[int], fetch_id: int = 1, **fields: Any) -> Any:
        """Begin to fetch blocks of another worker. Fields are those of the read."""
        read = {"epoch": EPOCH, "incarnation": source.incarnation, **fields}
        request = pb.FetchBlocksRequest(
            fetch_id=fetch_id,
            source_address=source.address,
            source=pb.ReadBlocksRequest(block_ids=pack_int32(block_ids), **read),
            epoch=EPOCH,
        )
        return self.stub.FetchBlocks(request)

    def read(self, block_ids: list[int], block_format: str, **fields: Any) -> Any:
        """Begin to read blocks of this worker."""
        read = {"epoch": EPOCH, "incarnation": self.incarnation, **fields}
        request = pb.ReadBlocksRequest(block_ids=pack_int32(block_ids), block_format=block_format, **read)
        return self.stub.ReadBlocks(request)


@asynccontextmanager
async def worker_client(address: str) -> AsyncIterator[WorkerClient]:
    """A client of the worker at an address."""
    async with grpc.aio.insecure_channel(address, options=channel_options(CLUSTER_MESSAGE_BYTES)) as channel:
        client = WorkerClient(channel, address)
        await client.describe()
        yield client


def worker_process(model: Path, *arguments: str) -> Service:
    """A worker without a scheduler: it takes steps from anybody."""
    return Service("worker_svc", "--model", str(model), "--threads", "1", *arguments, may_fork=True)


async def until_come(call: Any, num_blocks: int) -> None:
    """Read the progress of a fetch until so many blocks have come."""
    while (await call.read()).num_blocks < num_blocks:
        pass


async def code_of(call: Any) -> grpc.StatusCode:
    """The status that a call ends with."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK
