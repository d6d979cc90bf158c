"""Fuzzed messages to every RPC of all services: the statuses of their answers, and the memory that they leave.

`fuzz_scheduler` starts a scheduler with a scripted worker, `fuzz_worker` a worker with a tiny model. `tests.fuzz` plays
both.
"""

import asyncio
import queue
import random
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from common.step_wire import REQUEST_TAG
from quire.v1 import cluster_pb2, worker_pb2
from quire.v1 import inference_pb2 as pb
from tests.chaos_input.fuzzed_messages import fuzzed
from tests.chaos_input.fuzzed_requests import end_soon
from tests.hostile.besieged import MIB, besieged_scheduler, resident_bytes
from tests.scheduler.text_tokenizers import SPECIAL_TOKENS, byte_level_json
from tests.services import Service, free_address
from tests.worker.tiny_models import write_tiny_model

SCHEDULER = [pb.DESCRIPTOR.services_by_name["Inference"], cluster_pb2.DESCRIPTOR.services_by_name["Cluster"]]
WORKER = [worker_pb2.DESCRIPTOR.services_by_name["Worker"]]
_TOKENIZER = worker_pb2.TokenizerFiles(
    fingerprint="t",
    tokenizer_json=byte_level_json(),
    chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    special_tokens=SPECIAL_TOKENS,
)
_AT_ONCE = 8
MOST_GROWTH = 1.1  # of resident memory, a minute later
_CALL_S = 10.0  # what is paused, or waits for a pin, is not waited for longer
_MESSAGE_BYTES = 64 * MIB
# What the comments of the protos say that a call may end with. Never UNKNOWN, and INTERNAL only for a fault of ours.
DOCUMENTED = {
    "OK",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
    "UNAVAILABLE",
    "ABORTED",
    "DATA_LOSS",
    "PERMISSION_DENIED",  # of a worker that is registered with a scheduler, to strangers
}
_SUBMITTED = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), stopping=pb.StoppingParams(max_tokens=4))
# What is let in, from which some inputs differ in a field or two.
VALID: dict[str, Message] = {
    message.DESCRIPTOR.full_name: message
    for message in (
        _SUBMITTED,
        pb.SessionRequest(handle=1, submit=_SUBMITTED),
        pb.PinPrefixRequest(name="fuzz", token_ids=pb.TokenIds(ids=[7] * 40)),
        pb.UnpinPrefixRequest(name="fuzz"),
        pb.AttachRequest(request_id="fuzz-1"),
        pb.GetRequestRequest(request_id="fuzz-1"),
        pb.CancelRequest(request_id="fuzz-2"),
        pb.PauseRequest(request_id="fuzz-1"),
        pb.ResumeRequest(request_id="fuzz-1"),
        pb.DeleteRecordRequest(request_id="fuzz-1"),
        cluster_pb2.RegisterRequest(worker_id="w", address="127.0.0.1:9", incarnation="i", model_fingerprint="f"),
        cluster_pb2.DrainWorkerRequest(worker_id="fuzz-1"),
        worker_pb2.StepRequest(epoch=1, step_id=1, snapshot=True),
        worker_pb2.FetchBlocksRequest(
            fetch_id=1,
            source_address="127.0.0.1:9",
            source=worker_pb2.ReadBlocksRequest(epoch=1, incarnation="i", block_ids=bytes(4)),
            epoch=1,
        ),
        worker_pb2.ReadBlocksRequest(epoch=1, incarnation="i", block_ids=bytes(8)),
    )
}
_CODE_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


class FuzzedCall(NamedTuple):
    """One call: its method, and the messages that it sends."""

    path: str
    messages: list[bytes]


Answers = Counter[tuple[str, str]]  # by method and status; events of a session have statuses, too


def undocumented(answers: Answers) -> dict[str, int]:
    """Answers that no client should ever get."""
    return {f"{method} {code}": count for (method, code), count in answers.items() if code not in DOCUMENTED}


def calls(services: list[ServiceDescriptor], num_inputs: int, seed: int) -> Iterator[FuzzedCall]:
    """Calls of all methods of these services with so many messages in all."""
    rng = random.Random(seed)
    methods = [(service, method) for service in services for method in service.methods]
    while num_inputs > 0:
        service, method = rng.choice(methods)
        messages = [_message(method, rng) for _ in range(rng.choice((1, 2, 5)) if method.client_streaming else 1)]
        num_inputs -= len(messages)
        yield FuzzedCall(f"/{service.full_name}/{method.name}", messages)


async def send_all(address: str, made: Iterator[FuzzedCall]) -> Answers:
    """Makes the calls, several at a time over several connections.

    From threads: the client of gRPC's asyncio API makes INTERNAL, by itself, of a call that ends while it writes.
    """
    planned: queue.SimpleQueue[FuzzedCall | None] = queue.SimpleQueue()
    for each in (*made, *[None] * _AT_ONCE):
        planned.put(each)
    found = await asyncio.gather(*(asyncio.to_thread(_send_some, address, planned) for _ in range(_AT_ONCE)))
    return sum(found, Answers())


def _send_some(address: str, planned: "queue.SimpleQueue[FuzzedCall | None]") -> Answers:
    answers: Answers = Counter()
    # No keepalive: a busy machine may be slow to answer it.
    options = [("grpc.max_send_message_length", _MESSAGE_BYTES), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options=options) as channel:
        while (call := planned.get()) is not None:
            _send(channel, call, answers)
    return answers


def _send(channel: grpc.Channel, call: FuzzedCall, answers: Answers) -> None:
    stream: Any = channel.stream_stream(call.path)  # the frames of a single request are the same
    name = call.path.rpartition("/")[2]
    code = grpc.StatusCode.OK
    try:
        for response in stream(iter(call.messages), timeout=_CALL_S):
            if name == "Session":
                for event in pb.SessionResponse.FromString(response).events:
                    if event.HasField("error"):
                        answers["Session event", _CODE_NAMES[event.error.code]] += 1
    except grpc.RpcError as error:
        code = error.code()
    answers[name, code.name] += 1


def _message(method: MethodDescriptor, rng: random.Random) -> bytes:
    data = fuzzed(method.input_type, rng, VALID.get(method.input_type.full_name))
    kinds: dict[str, Any] = {"Generate": pb.GenerateRequest, "Session": pb.SessionRequest}
    if method.name == "StepStream" and rng.random() < 0.8:
        return data + struct.pack("<BI", REQUEST_TAG, crc32(data))
    if method.name not in kinds:
        return data
    try:
        message: Any = kinds[method.name].FromString(data)
    except DecodeError:
        return data
    if method.name == "Generate":
        end_soon(message, rng)
    elif message.HasField("submit"):
        end_soon(message.submit, rng)
    return bytes(message.SerializeToString())


class Report(NamedTuple):
    """Report on one service."""

    answers: dict[str, int]
    undocumented: dict[str, int]
    resident_before: int
    resident_after: int


def _report(answers: Answers, before: int, after: int) -> Report:
    shown = {f"{method} {code}": count for (method, code), count in sorted(answers.items())}
    return Report(shown, undocumented(answers), before, after)


async def fuzz_scheduler(num_inputs: int, seed: int) -> Report:
    """Inference and Cluster, with a neighbour that must not notice. Memory is compared from half of the way on."""
    async with besieged_scheduler(tokenizer=_TOKENIZER) as site:
        answers = await send_all(site.address, calls(SCHEDULER, num_inputs // 2, seed))
        before = site.resident_bytes
        answers += await send_all(site.address, calls(SCHEDULER, num_inputs - num_inputs // 2, seed + 1))
        await site.neighbour.until_answered(5)
        assert not site.neighbour.failures, site.neighbour.failures[:5]
        after = await site.until_resident_below(before * MOST_GROWTH)
        return _report(answers, before, after)


async def fuzz_worker(num_inputs: int, seed: int) -> Report:
    """The worker's own port, without a scheduler."""
    with tempfile.TemporaryDirectory(prefix="quire-fuzz-") as folder:
        write_tiny_model("llama_gqa", Path(folder), seed=3)
        address = free_address()
        arguments = ("--model", folder, "--listen", address, "--threads", "1", "--dtype", "float32")
        with Service("worker_svc", *arguments, "--num-blocks", "64") as service:
            await asyncio.to_thread(service.wait_for, "ready")
            answers = await send_all(address, calls(WORKER, num_inputs // 2, seed))  # its own buffers grow at first
            before = resident_bytes(service.process.pid)
            answers += await send_all(address, calls(WORKER, num_inputs - num_inputs // 2, seed + 1))
            after = await _resident_later(service.process.pid, before * MOST_GROWTH)
            assert service.process.poll() is None, "the worker has died"
            assert not [line for line in service.raw if "Traceback" in line], "".join(service.raw[-40:])
            return _report(answers, before, after)


async def _resident_later(pid: int, wanted_bytes: float) -> int:
    """Wait until a process has no more than this much memory, or a minute has passed; return its memory."""
    deadline_s = time.monotonic() + 60
    while (num_bytes := resident_bytes(pid)) > wanted_bytes:
        if time.monotonic() > deadline_s:
            break
        await asyncio.sleep(0.1)
    return num_bytes
