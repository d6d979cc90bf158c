"""The Worker service over a real connection, in front of a runner whose steps the test lets through."""

import asyncio
import contextlib
import struct
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast
from zlib import crc32

import grpc
import pytest

from common.rpc import CLUSTER_MESSAGE_BYTES
from common.serving import GrpcServer
from common.step import Step, StepResult, StepStatus
from common.step_codec import result_from_pb, step_to_pb
from common.step_wire import (
    REQUEST_TAG,
    STEP_KEY,
    open_any_request,
    open_request,
    open_response,
    open_step_stream,
    seal_request,
    seal_response,
)
from quire.errors import DataLossError, InvalidRequestError, UnavailableError
from quire.rpc import channel_options, error_of
from quire.v1 import inference_pb2, worker_pb2_grpc
from quire.v1 import worker_pb2 as pb
from tests.worker.steps import LIMITS
from worker_svc.checkpoint.tokenizer_files import TokenizerFiles
from worker_svc.description import ModelDescription, PhaseTime, WorkerDescription
from worker_svc.service.servicer import SERVICE_NAME, LoadedWorker, WorkerServicer, add_to_server
from worker_svc.steps.executor import StepExecutor
from worker_svc.steps.task_thread import TaskThread

TOKENIZER = TokenizerFiles(tokenizer_json=b'{"a": 1}', chat_template="{{ x }}", special_tokens={"bos_token": "<s>"})
DESCRIPTION = WorkerDescription(
    model=ModelDescription(
        name="tiny", fingerprint="f" * 64, architecture="LlamaForCausalLM", dtype="float32", eos_token_ids=(2, 3)
    ),
    tokenizer=TOKENIZER,
    limits=LIMITS,
    bytes_per_block=4096,
    kv_dtype="float32",
    weight_dtype="float32",
    device="cpu",
    startup=(PhaseTime("weights", 12.5),),
)


class GatedRunner:
    """Executes a step when its gate is open; a step's token is its id."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)
        self.executed: list[int] = []

    def launch(self, step: Step) -> StepResult:
        self.begun.release()
        assert self.gate.wait(30)
        self.executed.append(step.step_id)
        return StepResult(epoch=step.epoch, step_id=step.step_id, token_ids=[step.step_id])


class Connection:
    """One client of the worker."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=channel_options(CLUSTER_MESSAGE_BYTES))
        self.stub: Any = worker_pb2_grpc.WorkerStub(self.channel)

    def open(self, step_key: str = "") -> "Stream":
        return Stream(open_step_stream(self.channel, step_key))

    def open_raw(self) -> "Stream":
        """One that sends bytes as they are."""
        return Stream(self.channel.stream_stream(f"/{SERVICE_NAME}/StepStream")())


class Stream:
    """One stream of steps."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, epoch: int, step_id: int, *, snapshot: bool = False) -> None:
        await self.call.write(step_to_pb(Step(epoch=epoch, step_id=step_id, snapshot=snapshot)))

    async def read(self) -> StepResult | None:
        """The next answer; None at the end of a stream that ended well."""
        data = await self.call.read()
        return result_from_pb(open_response(data)) if isinstance(data, bytes) else None

    async def ask(self, epoch: int, step_id: int, *, snapshot: bool = False) -> StepStatus:
        await self.send(epoch, step_id, snapshot=snapshot)
        answer = await self.read()
        assert answer is not None
        return answer.status

    async def error(self) -> grpc.StatusCode:
        """Read the stream past all answers; return how it ended."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await self.read() is not None:
                pass
        code = await self.call.code()
        assert isinstance(code, grpc.StatusCode)
        return code


class Worker:
    """A served worker and the parts behind it."""

    def __init__(self, step_key: str = "") -> None:
        self.runner = GatedRunner()
        self.thread = TaskThread("execution")
        self.executor = StepExecutor(self.runner, self.thread, on_device_lost=pytest.fail)
        self.servicer = WorkerServicer("w1", "i1", step_key)
        self.server = GrpcServer([SERVICE_NAME], CLUSTER_MESSAGE_BYTES)
        add_to_server(self.servicer, self.server.grpc)
        self.address = self.server.bind("127.0.0.1:0")

    def load(self) -> None:
        self.servicer.serve(LoadedWorker(DESCRIPTION, self.executor))

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        connection = Connection(self.address)
        yield connection
        await connection.channel.close()


@pytest.fixture
async def loading() -> AsyncIterator[Worker]:
    """A worker whose model is not there yet."""
    worker = Worker()
    await worker.server.start()
    yield worker
    worker.runner.gate.set()
    await worker.server.stop(0)
    await worker.executor.close()
    await worker.thread.close()


@pytest.fixture
async def worker(loading: Worker) -> Worker:
    loading.load()
    return loading


@pytest.fixture
async def client(loading: Worker) -> AsyncIterator[Connection]:
    async with loading.connect() as connection:
        yield connection


async def test_describe_says_what_the_worker_is(worker: Worker, client: Connection) -> None:
    answer = await client.stub.Describe(pb.DescribeRequest())
    assert (answer.worker_id, answer.incarnation, answer.device) == ("w1", "i1", "cpu")
    assert (answer.num_seats, answer.max_batched_tokens) == (8, 24)
    assert answer.model == pb.ModelInfo(
        name="tiny",
        fingerprint="f" * 64,
        architecture="LlamaForCausalLM",
        dtype="float32",
        vocab_size=100,
        max_model_len=40,
        eos_token_ids=[2, 3],
        sampling_defaults=inference_pb2.SamplingParams(),
    )
    assert answer.pool == pb.PoolInfo(
        num_blocks=32, block_size=4, num_host_blocks=4, bytes_per_block=4096, dtype="float32"
    )
    assert answer.tokenizer.tokenizer_json == TOKENIZER.tokenizer_json
    assert answer.tokenizer.chat_template == "{{ x }}"
    assert dict(answer.tokenizer.special_tokens) == {"bos_token": "<s>"}
    assert [(each.phase, each.duration_ms) for each in answer.startup] == [("weights", 12.5)]


async def test_a_tokenizer_that_the_asker_knows_is_not_sent_again(worker: Worker, client: Connection) -> None:
    answer = await client.stub.Describe(pb.DescribeRequest(known_tokenizer_fingerprint=TOKENIZER.fingerprint))
    assert answer.tokenizer.fingerprint == TOKENIZER.fingerprint
    assert answer.tokenizer.tokenizer_json == b""


async def test_while_loading_every_call_is_told_when_to_come_back(loading: Worker, client: Connection) -> None:
    stream = client.open()
    calls = [client.stub.Describe(pb.DescribeRequest()), client.stub.Step(pb.StepRequest()), stream.read()]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call
        error = error_of(refusal.value)
        assert isinstance(error, UnavailableError)
        assert 0 < error.retry_after_s < 2
    loading.load()
    assert (await client.stub.Describe(pb.DescribeRequest())).worker_id == "w1"


async def test_steps_are_answered_in_order_and_the_next_is_taken_while_one_runs(
    worker: Worker, client: Connection
) -> None:
    worker.runner.gate.clear()
    stream = client.open()
    await stream.send(1, 1, snapshot=True)
    await stream.send(1, 2)
    await asyncio.to_thread(worker.runner.begun.acquire)
    await stream.send(1, 3)
    worker.runner.gate.set()
    answers = [await stream.read() for _ in range(3)]
    assert [answer and answer.step_id for answer in answers] == [1, 2, 3]
    assert [answer and list(answer.token_ids) for answer in answers] == [[1], [2], [3]]
    assert answers[1] is not None
    assert 0 < answers[1].exec_ns <= answers[1].total_ns


async def test_a_closed_stream_still_gets_the_answers_to_its_steps(worker: Worker, client: Connection) -> None:
    worker.runner.gate.clear()
    stream = client.open()
    await stream.send(1, 1, snapshot=True)
    await stream.send(1, 2)
    await stream.call.done_writing()
    worker.runner.gate.set()
    answers = [await stream.read() for _ in range(3)]
    assert [answer and answer.step_id for answer in answers] == [1, 2, None]
    assert await stream.call.code() is grpc.StatusCode.OK


async def test_steps_go_on_where_a_broken_stream_left(worker: Worker, client: Connection) -> None:
    stream = client.open()
    assert await stream.ask(1, 1, snapshot=True) is StepStatus.OK
    stream.call.cancel()
    again = client.open()
    assert await again.ask(1, 2) is StepStatus.OK


async def test_a_newer_stream_replaces_the_older_even_while_it_waits_for_an_answer(
    worker: Worker, client: Connection
) -> None:
    old, new = client.open(), client.open()
    assert await old.ask(1, 1, snapshot=True) is StepStatus.OK
    worker.runner.gate.clear()
    await old.send(1, 2)
    await asyncio.to_thread(worker.runner.begun.acquire)
    await asyncio.to_thread(worker.runner.begun.acquire)
    await new.send(1, 3, snapshot=True)
    assert await old.error() is grpc.StatusCode.ABORTED
    worker.runner.gate.set()
    answer = await new.read()
    assert answer is not None
    assert (answer.step_id, answer.status) == (3, StepStatus.OK)


async def test_a_stream_of_a_lower_epoch_replaces_nobody(worker: Worker, client: Connection) -> None:
    current, stale = client.open(), client.open()
    assert await current.ask(7, 1, snapshot=True) is StepStatus.OK
    assert await stale.ask(6, 1, snapshot=True) is StepStatus.STALE_EPOCH
    assert await current.ask(7, 2) is StepStatus.OK


async def test_a_stream_without_a_step_replaces_nobody(worker: Worker, client: Connection) -> None:
    current, idle = client.open(), client.open()
    assert await current.ask(1, 1, snapshot=True) is StepStatus.OK
    await idle.call.done_writing()
    assert await idle.read() is None
    assert await current.ask(1, 2) is StepStatus.OK


async def test_arrays_that_cannot_be_are_an_invalid_step_and_the_stream_goes_on(
    worker: Worker, client: Connection
) -> None:
    stream = client.open()
    assert await stream.ask(1, 1, snapshot=True) is StepStatus.OK
    await stream.call.write(pb.StepRequest(epoch=1, step_id=2, copies=b"\x01\x00\x00\x00"))
    answer = await stream.read()
    assert answer is not None
    assert (answer.status, answer.error) == (StepStatus.INVALID, "copies holds pairs, but has 1 numbers")
    assert await stream.ask(1, 2) is StepStatus.OK


async def test_undecodable_bytes_end_their_call_alone(worker: Worker, client: Connection) -> None:
    good = client.open()
    assert await good.ask(1, 1, snapshot=True) is StepStatus.OK
    path = f"/{SERVICE_NAME}/"
    raw_single: Any = client.channel.unary_unary(path + "Step", request_serializer=None, response_deserializer=None)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await raw_single(b"\xff\xff\xff")
    assert isinstance(error_of(refusal.value), InvalidRequestError)
    raw = client.open_raw()
    await raw.call.write(b"\xff\xff\xff" + struct.pack("<BI", REQUEST_TAG, crc32(b"\xff\xff\xff")))
    assert await raw.error() is grpc.StatusCode.INVALID_ARGUMENT
    assert await good.ask(1, 2) is StepStatus.OK


@pytest.mark.parametrize("damage", ["a flipped bit", "no checksum", "cut short", "nothing at all"])
async def test_a_damaged_step_ends_its_stream_with_data_loss_and_is_not_executed(
    worker: Worker, client: Connection, damage: str
) -> None:
    stream = client.open_raw()
    sealed = seal_request(step_to_pb(Step(epoch=1, step_id=2, snapshot=True, rows=[3])))
    bytes_of = {
        "a flipped bit": sealed[:3] + bytes([sealed[3] ^ 4]) + sealed[4:],
        "no checksum": sealed[:-5],
        "cut short": sealed[:-6],
        "nothing at all": b"",
    }
    await stream.call.write(seal_request(step_to_pb(Step(epoch=1, step_id=1, snapshot=True))))
    await stream.call.write(bytes_of[damage])
    answer = await stream.read()
    assert answer is not None and (answer.step_id, answer.status) == (1, StepStatus.OK)
    assert await stream.error() is grpc.StatusCode.DATA_LOSS
    assert worker.runner.executed == [1]
    assert await client.open().ask(1, 2) is StepStatus.OK


async def test_a_single_step_may_go_without_a_checksum_but_not_with_a_wrong_one(
    worker: Worker, client: Connection
) -> None:
    request = step_to_pb(Step(epoch=1, step_id=1, snapshot=True))
    assert (await client.stub.Step(request)).status == pb.STEP_STATUS_OK
    request.checksum = 1
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await client.stub.Step(request)
    assert isinstance(error_of(refusal.value), DataLossError)
    sealed = pb.StepRequest.FromString(seal_request(step_to_pb(Step(epoch=1, step_id=2))))
    assert (await client.stub.Step(sealed)).status == pb.STEP_STATUS_OK
    assert worker.runner.executed == [1, 2]


async def test_a_single_step_sent_twice_is_executed_once(worker: Worker, client: Connection) -> None:
    request = step_to_pb(Step(epoch=1, step_id=5, snapshot=True))
    first = await client.stub.Step(request)
    again = await client.stub.Step(request)
    assert first.token_ids == again.token_ids
    assert worker.runner.executed == [5]


async def test_more_steps_than_the_worker_takes_at_once_wait_on_the_wire_and_are_all_answered(
    worker: Worker, client: Connection
) -> None:
    stream = client.open()
    worker.runner.gate.clear()
    for step_id in range(1, 41):
        await stream.send(1, step_id, snapshot=True)
    worker.runner.gate.set()
    answers = [await stream.read() for _ in range(40)]
    assert [answer and answer.step_id for answer in answers] == list(range(1, 41))


async def test_draining_answers_what_was_taken_and_refuses_the_rest(worker: Worker, client: Connection) -> None:
    stream, idle = client.open(), client.open()
    assert await stream.ask(1, 1, snapshot=True) is StepStatus.OK
    await idle.call.wait_for_connection()
    worker.runner.gate.clear()
    await stream.send(1, 2)
    await asyncio.to_thread(worker.runner.begun.acquire)
    await asyncio.to_thread(worker.runner.begun.acquire)
    draining = asyncio.create_task(worker.servicer.drain())
    worker.runner.gate.set()
    await draining
    answer = await stream.read()
    assert answer is not None
    assert answer.step_id == 2
    assert await stream.error() is grpc.StatusCode.UNAVAILABLE
    assert await idle.error() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await client.stub.Step(pb.StepRequest(epoch=1, step_id=3))
    assert isinstance(error_of(refusal.value), UnavailableError)


async def test_a_worker_with_a_key_takes_steps_of_who_has_it_and_no_stranger_can_move_its_epoch() -> None:
    worker = Worker("secret")
    await worker.server.start()
    worker.runner.gate.set()
    worker.load()
    try:
        async with worker.connect() as ours, worker.connect() as stranger:
            stream = ours.open("secret")
            assert await stream.ask(1, 1, snapshot=True) is StepStatus.OK
            for key in ("", "wrong", "Secret"):
                assert await stranger.open(key).error() is grpc.StatusCode.PERMISSION_DENIED
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    request = step_to_pb(Step(epoch=2**64 - 1, step_id=1, snapshot=True))
                    await stranger.stub.Step(request, metadata=((STEP_KEY, key),))
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert (await stranger.stub.Describe(pb.DescribeRequest())).worker_id == "w1"
            assert await stream.ask(1, 2) is StepStatus.OK
    finally:
        await worker.server.stop(0)
        await worker.executor.close()
        await worker.thread.close()


class Registry:
    """A server as gRPC has it from 1.84 on: what is registered by name comes before generic handlers."""

    def __init__(self) -> None:
        self.generic: list[grpc.GenericRpcHandler] = []
        self.by_name: dict[str, object] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self.generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, object]) -> None:
        self.by_name |= {f"/{service}/{method}": handler for method, handler in handlers.items()}

    def handler(self, path: str) -> Any:
        details = SimpleNamespace(method=path, invocation_metadata=())
        found = (each.service(details) for each in self.generic)
        return self.by_name.get(path) or next(handler for handler in found if handler is not None)


def test_calls_whose_bytes_are_checked_come_to_the_handlers_that_check_them_however_they_are_looked_up() -> None:
    server = Registry()
    add_to_server(WorkerServicer("w1", "i1", ""), cast(grpc.aio.Server, server))
    methods = pb.DESCRIPTOR.services_by_name["Worker"].methods_by_name
    handlers = {name: server.handler(f"/{SERVICE_NAME}/{name}") for name in methods}
    assert handlers["StepStream"].request_deserializer is open_request
    assert handlers["StepStream"].response_serializer is seal_response
    assert handlers["Step"].request_deserializer is open_any_request
    assert handlers["ReadBlocks"].response_serializer is bytes
    assert all(handler.request_deserializer is not None for handler in handlers.values())
