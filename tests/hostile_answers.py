"""Hostile answers of a worker, made from right ones by the descriptors of `worker.proto`: every field, wrong values.

Each kind changes one right `StepResponse` into one that no honest worker gives. A field that is added to the message is
in them without anybody's doing. Who drives them answers with `change` in place of the right answer;
`tests.scheduler.test_hostile_answers` does so against the real scheduler.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from zlib import crc32

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from common.step_wire import RESPONSE_TAG, seal_response
from quire.v1 import worker_pb2 as pb

Answer = pb.StepResponse | bytes

MAX_UINT64 = 2**64 - 1
NUMBERS: dict[int, tuple[int, ...]] = {
    FieldDescriptor.TYPE_UINT64: (0, 1, 2**31, 2**53, 2**63, MAX_UINT64),
    FieldDescriptor.TYPE_UINT32: (0, 1, 7, 2**16, 2**32 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), -1, 0, 1, 7, 2**31 - 1),
}
INT32_VALUES = (-(2**31), -1, 0, 1, 100_000, 2**31 - 1)
FLOAT32_VALUES = (float("nan"), float("inf"), float("-inf"), 0.0, 1.0, 3e38)
FLOAT_FIELDS = {"logprobs", "top_logprobs"}  # of `bytes` fields: the others hold int32
TIMES = {"queue_ns", "exec_ns", "total_ns", "swap_ns"}  # what a worker says of them changes no output


@dataclass(frozen=True, slots=True)
class HostileAnswer:
    """One kind: its name, and what it makes of a right answer (a copy). Harmless where the answer has no such field."""

    name: str
    change: Callable[[pb.StepResponse], Answer]


def hostile_answers() -> list[HostileAnswer]:
    """List all kinds, in a fixed order."""
    return [*_of_raw_bytes(), *_of_fields(pb.StepResponse.DESCRIPTOR, "", lambda response: [response])]


def _of_raw_bytes() -> Iterator[HostileAnswer]:
    for name, data in {
        "nothing": b"",
        "zeros": bytes(64),
        "ones": b"\xff" * 64,
        "half a field": b"\x2a\x7f",
        "a field of 2 GB": b"\x2a\xff\xff\xff\xff\x07",
        "groups without end": b"\x0b" * 1000,
    }.items():
        yield HostileAnswer(f"sealed {name}", lambda _, data=data: _sealed(data))  # type: ignore[misc]
        yield HostileAnswer(f"bare {name}", lambda _, data=data: data)  # type: ignore[misc]
    yield HostileAnswer("unknown fields", lambda response: _sealed(response.SerializeToString() + b"\xf8\x3f\x01" * 99))
    yield HostileAnswer("a second answer inside", lambda response: _sealed(response.SerializeToString() * 2))
    yield HostileAnswer("no checksum", lambda response: response.SerializeToString())
    yield HostileAnswer("a flipped bit", _flipped)
    yield HostileAnswer("cut off", lambda response: seal_response(response)[:-7])
    yield HostileAnswer("17 MB of error", lambda response: _sealed(_with_error(response, 17 << 20)))


Find = Callable[[pb.StepResponse], "list[Message]"]


def _of_fields(descriptor: Descriptor, path: str, find: Find) -> Iterator[HostileAnswer]:
    """Kinds for each field of the messages at `path`, which `find` gives, and of the messages in them."""
    for field in descriptor.fields:
        name = f"{path}{field.name}"
        if field.name == "checksum":
            continue
        if field.message_type is not None:
            yield from _of_messages(name, field, find)
            yield from _of_fields(field.message_type, f"{name}.", _inner(field, find))
        elif field.type == FieldDescriptor.TYPE_ENUM:
            for number in (0, 2, 3, 4, 5, 6, 2**31 - 1):
                yield _setting(f"{name} = {number}", field, find, number)
        elif field.type == FieldDescriptor.TYPE_STRING:
            yield _setting(f"{name} of a million characters", field, find, "x" * 1_000_000)
            yield _setting(f"{name} of control characters", field, find, "\x00\x1b[2J\n{}%s")
        elif field.type == FieldDescriptor.TYPE_BYTES:
            yield from _of_array(name, field, find)
        else:
            for number in NUMBERS[field.type]:
                yield _setting(f"{name} = {number}", field, find, number)


def _of_messages(name: str, field: FieldDescriptor, find: Find) -> Iterator[HostileAnswer]:
    def change(response: pb.StepResponse, act: Callable[[Message], None]) -> Answer:
        for message in find(response):
            act(message)
        return response

    def add(message: Message, count: int) -> None:
        if field.is_repeated:
            for _ in range(count):
                getattr(message, field.name).add()
        else:
            getattr(message, field.name).SetInParent()

    def double(message: Message) -> None:
        if field.is_repeated:
            getattr(message, field.name).extend(list(getattr(message, field.name)))

    yield HostileAnswer(f"{name} left out", lambda response: change(response, lambda m: m.ClearField(field.name)))
    yield HostileAnswer(f"{name} and an empty one", lambda response: change(response, lambda m: add(m, 1)))
    yield HostileAnswer(f"{name} and 100,000 empty ones", lambda response: change(response, lambda m: add(m, 100_000)))
    yield HostileAnswer(f"{name} twice", lambda response: change(response, double))


def _of_array(name: str, field: FieldDescriptor, find: Find) -> Iterator[HostileAnswer]:
    form, values = ("<f", FLOAT32_VALUES) if field.name in FLOAT_FIELDS else ("<i", INT32_VALUES)
    for value in values:
        one = struct.pack(form, value)
        yield _replacing(f"{name}: all {value}", field, find, lambda data, one=one: one * (len(data) // 4))  # type: ignore[misc]
        yield _replacing(f"{name}: first {value}", field, find, lambda data, one=one: one + data[4:])  # type: ignore[misc]
        yield _replacing(f"{name}: last {value}", field, find, lambda data, one=one: data[:-4] + one)  # type: ignore[misc]
    yield _replacing(f"{name}: empty", field, find, lambda data: b"")
    yield _replacing(f"{name}: ragged", field, find, lambda data: data + b"\x01")
    yield _replacing(f"{name}: one short", field, find, lambda data: data[:-4])
    yield _replacing(f"{name}: one more", field, find, lambda data: data + bytes(4))
    yield _replacing(f"{name}: twice", field, find, lambda data: data + data)
    yield _replacing(f"{name}: reversed", field, find, _reversed)
    yield _replacing(f"{name}: a million", field, find, lambda data: bytes(4_000_000))


def _inner(field: FieldDescriptor, find: Find) -> Find:
    def found(response: pb.StepResponse) -> list[Message]:
        if field.is_repeated:
            return [each for message in find(response) for each in getattr(message, field.name)]
        return [getattr(message, field.name) for message in find(response) if message.HasField(field.name)]

    return found


def _setting(name: str, field: FieldDescriptor, find: Find, value: object) -> HostileAnswer:
    def change(response: pb.StepResponse) -> Answer:
        for message in find(response):
            setattr(message, field.name, value)
        return response

    return HostileAnswer(name, change)


def _replacing(name: str, field: FieldDescriptor, find: Find, make: Callable[[bytes], bytes]) -> HostileAnswer:
    def change(response: pb.StepResponse) -> Answer:
        for message in find(response):
            setattr(message, field.name, make(getattr(message, field.name)))
        return response

    return HostileAnswer(name, change)


def _reversed(data: bytes) -> bytes:
    return b"".join(data[i : i + 4] for i in range(len(data) - 4, -1, -4))


def _sealed(data: bytes) -> bytes:
    return data + struct.pack("<BI", RESPONSE_TAG, crc32(data))


def _flipped(response: pb.StepResponse) -> bytes:
    sealed = seal_response(response)
    return sealed[:1] + bytes([sealed[1] ^ 1]) + sealed[2:]


def _with_error(response: pb.StepResponse, num_chars: int) -> bytes:
    response.error = "x" * num_chars
    return response.SerializeToString()
