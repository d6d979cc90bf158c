"""Every string, list and map of every request has a bound, which its comment states and which holds at the edge."""

import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from common.bounds import BOUNDS, CHECKED_BY_HANDLER, FOREIGN, MOST_ANNOTATION_BYTES
from common.bounds_check import OutOfBoundsError, bounded_fields, check_of, check_of_method
from common.quick_bounds import QuickBounds
from common.step_wire import open_request, seal_request
from quire.errors import InvalidRequestError
from quire.v1 import cluster_pb2, worker_pb2
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.admission import MOST_PARAMETER_BYTES
from tests.bounded_fields import beyond, bounded_paths, is_map, message_at
from tests.chaos_input.fuzzed_messages import fuzzed
from tests.wire_comments import comments_of_fields

SERVICES = [
    service for module in (pb, cluster_pb2, worker_pb2) for service in module.DESCRIPTOR.services_by_name.values()
]
REQUESTS = {method.input_type.full_name: method.input_type for service in SERVICES for method in service.methods}
UNKNOWN = b"\xaa\xfa\x01\x03abc"  # field 4005


def reachable(descriptor: Descriptor, seen: set[str]) -> Iterator[FieldDescriptor]:
    """Fields that the edge has to bound."""
    if descriptor.full_name in seen:
        return
    seen.add(descriptor.full_name)
    for each in descriptor.fields:
        yield each
        if each.message_type is not None and not is_map(each) and descriptor.full_name not in CHECKED_BY_HANDLER:
            yield from reachable(each.message_type, seen)


def fields_of_requests() -> list[FieldDescriptor]:
    seen: set[str] = set()
    return [field for descriptor in REQUESTS.values() for field in reachable(descriptor, seen)]


def _owner(field: FieldDescriptor) -> str:
    assert field.containing_type is not None
    return field.containing_type.full_name


def test_every_string_list_and_map_of_a_request_has_a_bound() -> None:
    unbounded = []
    for each in fields_of_requests():
        bound = BOUNDS.get(each.full_name)
        is_text = each.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
        is_part_of_step = _owner(each) in CHECKED_BY_HANDLER and not each.is_repeated
        lacks_items = each.is_repeated and (bound is None or bound.max_items is None)
        lacks_size = is_text and not is_part_of_step and (bound is None or (bound.max_chars or bound.max_bytes) is None)
        if lacks_items or lacks_size:
            unbounded.append(each.full_name)
    assert not unbounded, f"give each a bound in common/bounds.py, and state it in its comment: {unbounded}"


def test_no_bound_is_left_of_a_field_that_is_gone() -> None:
    assert not set(BOUNDS) - {each.full_name for each in fields_of_requests()}


def test_the_comment_of_each_field_states_its_bound(tmp_path: Path) -> None:
    comments = comments_of_fields(tmp_path)
    for name, bound in BOUNDS.items():
        for number in (bound.max_chars, bound.max_bytes, bound.max_items):
            assert number is None or f"{number:,}" in comments[name], f"the comment of {name} does not say {number:,}"


@pytest.mark.parametrize("request_name", sorted(set(REQUESTS) - CHECKED_BY_HANDLER))
def test_a_field_at_its_bound_is_taken_and_one_beyond_it_refused_by_its_path_alone(request_name: str) -> None:
    descriptor = REQUESTS[request_name]
    check = check_of(descriptor)
    for path, field in bounded_paths(descriptor):
        for is_beyond in (False, True):
            message, shown = message_at(descriptor, path, field, beyond(field, by=int(is_beyond)))
            data = message.SerializeToString()
            if not is_beyond:
                assert check.parse(data, type(message).FromString) == message
                continue
            with pytest.raises(OutOfBoundsError) as caught:
                check.parse(data, type(message).FromString)
            (violation,) = caught.value.violations
            assert violation.field == shown
            assert "give at most" in violation.description and len(violation.description) < 100


@pytest.mark.parametrize("request_name", sorted(set(REQUESTS) - CHECKED_BY_HANDLER))
def test_unknown_fields_are_dropped_at_every_depth(request_name: str) -> None:
    descriptor = REQUESTS[request_name]
    made = GetMessageClass(descriptor)()
    data = _with_unknown(made, random.Random(1))
    parsed = check_of(descriptor).parse(data, type(made).FromString)
    assert b"abc" in data and b"abc" not in parsed.SerializeToString()


def _with_unknown(message: Message, rng: random.Random) -> bytes:
    """Encode a message with an unknown field in it and in each message that it may have."""
    data = UNKNOWN
    descriptor: Any = message.DESCRIPTOR
    for each in descriptor.fields:
        if each.message_type is not None and not is_map(each):
            below = _with_unknown(GetMessageClass(each.message_type)(), rng)
            assert len(below) < 128 * 128
            data += _tag(each.number) + _length(below) + below
    return data


def _tag(number: int) -> bytes:
    return bytes([number << 3 | 2])


def _length(data: bytes) -> bytes:
    return bytes([len(data)]) if len(data) < 128 else bytes([len(data) & 127 | 128, len(data) >> 7])


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_list_that_would_take_much_memory_is_refused_before_it_is_parsed(wrapped: bool) -> None:
    """Two million empty messages of two bytes each take a hundred megabytes once they are parsed."""

    def not_to_be_called(data: bytes) -> Message:
        raise AssertionError("it was parsed")

    messages = b"\x0a\x00" * 2_000_000
    data = b"\x1a" + _varint(len(messages)) + messages
    if wrapped:
        data = b"\x12" + _varint(len(data)) + data + b"\x08\x07"  # its handle comes last
    check = check_of((pb.SessionRequest if wrapped else pb.GenerateRequest).DESCRIPTOR)
    tracemalloc.start()
    with pytest.raises(OutOfBoundsError) as caught:
        check.parse(data, not_to_be_called)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    assert [each.field for each in caught.value.violations] == ["chat.messages"]
    assert caught.value.numbers.get("handle") == (7 if wrapped else None)


def test_a_list_within_its_bound_with_too_many_fields_in_its_items_is_refused_by_its_path() -> None:
    """Regression: it was a refusal without the message's numbers, which ended a session with all its requests."""
    submit = pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="u", content="x", name="a")] * 65_536))
    data = pb.SessionRequest(submit=submit).SerializeToString()
    assert len(data) < 1_000_000
    for whole in (b"\x08\x07" + data, data + b"\x08\x07"):  # its handle first, and last
        with pytest.raises(OutOfBoundsError, match=r"^chat\.messages: has more than 262,144 fields in all") as caught:
            check_of(pb.SessionRequest.DESCRIPTOR).parse(whole, pb.SessionRequest.FromString)
        assert [each.field for each in caught.value.violations] == ["chat.messages"]
        assert caught.value.numbers["handle"] == 7


def test_unknown_fields_without_number_are_a_refusal_of_their_message() -> None:
    submit = b"\xf8\x07\x01" * 300_000  # field 127
    data = b"\x08\x07\x12" + _varint(len(submit)) + submit
    with pytest.raises(OutOfBoundsError, match="more than 262,144 fields in all") as caught:
        check_of(pb.SessionRequest.DESCRIPTOR).parse(data, pb.SessionRequest.FromString)
    assert not caught.value.violations and caught.value.numbers["handle"] == 7


@pytest.mark.parametrize("num_within", [262_142, 262_143, 262_144])
def test_a_message_whose_last_fields_are_too_many_is_refused_by_its_handle(num_within: int) -> None:
    """Regression: a limit that was reached by a field of the top level itself ended the stream of all requests."""
    rows = [pb.ChatMessage(role="user", content="x", name="a")] * 65_534  # four records each
    rest = num_within - 3 - 4 * len(rows) - 2  # fields of two more, beside handle, submit and chat
    last = (pb.ChatMessage(), pb.ChatMessage(content="x"), pb.ChatMessage(content="x", name="x"))[rest - 1]
    rows += [pb.ChatMessage(role="user"), last]
    wrapped = pb.SessionRequest(submit=pb.GenerateRequest(chat=pb.ChatPrompt(messages=rows)))
    data = pb.SessionRequest(handle=7).SerializeToString() + wrapped.SerializeToString()
    data += pb.SessionRequest(number=3, shards_version=1).SerializeToString() * 2
    with pytest.raises(OutOfBoundsError, match="fields in all") as caught:
        check_of(pb.SessionRequest.DESCRIPTOR).parse(data, pb.SessionRequest.FromString)
    assert caught.value.numbers["handle"] == 7


def test_a_list_in_several_pieces_counts_as_one() -> None:
    """Messages of one field that come twice are one."""
    piece = b"\x0a\x00" * 40_000
    data = (b"\x1a" + _varint(len(piece)) + piece) * 2
    with pytest.raises(OutOfBoundsError, match=r"chat\.messages: has more than 65,536 items"):
        check_of(pb.GenerateRequest.DESCRIPTOR).parse(data, pb.GenerateRequest.FromString)


@pytest.mark.parametrize(
    "data", [b"\x0b" * 70_000, b"\x08\x01" * 300_000, b"\x1a\xff\xff\xff\x7f" + bytes(70_000), b"\xff" * 70_000]
)
def test_large_messages_that_are_none_are_refused_in_words(data: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        check_of(pb.GenerateRequest.DESCRIPTOR).parse(data, pb.GenerateRequest.FromString)


def test_a_step_describes_no_more_seats_than_a_worker_can_have() -> None:
    state = worker_pb2.SequenceState()
    assert len(open_request(seal_request(worker_pb2.StepRequest(whole=[state] * 65_536))).whole) == 65_536
    with pytest.raises(OutOfBoundsError, match="whole"):
        open_request(seal_request(worker_pb2.StepRequest(whole=[state] * 65_537)))


def test_requests_of_services_that_are_not_ours_are_bounded_too() -> None:
    check = check_of_method("/grpc.health.v1.Health/Watch")
    assert check is not None and FOREIGN.max_chars is not None
    check.check(health_pb2.HealthCheckRequest(service="s" * FOREIGN.max_chars))
    with pytest.raises(OutOfBoundsError, match="service: has 1,025 characters"):
        check.check(health_pb2.HealthCheckRequest(service="s" * (FOREIGN.max_chars + 1)))
    assert check_of_method("/nobody.Knows/This") is None


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


@pytest.mark.parametrize("request_name", sorted(set(REQUESTS) - CHECKED_BY_HANDLER))
def test_what_the_quick_look_lets_through_is_within_every_bound(request_name: str) -> None:
    descriptor, rng = REQUESTS[request_name], random.Random(request_name)
    quick = QuickBounds(bounded_fields(descriptor))
    kind = GetMessageClass(descriptor)
    num_quick = 0
    for _ in range(60):
        try:
            message: Any = kind.FromString(fuzzed(descriptor, rng))
        except DecodeError:
            continue
        message.DiscardUnknownFields()
        if quick.allow(message, message.ByteSize()):
            num_quick += 1
            check_of(descriptor).check(message)
    assert num_quick


def test_the_largest_parameters_within_bounds_fit_into_what_the_journal_keeps_of_a_request() -> None:
    request = pb.GenerateRequest(
        request_id="r" * 128,
        tenant="👋" * 128,
        cache_salt="👋" * 128,
        sampling=pb.SamplingParams(
            logit_bias={2**31 - 1 - i: 1.5 for i in range(1024)},
            allowed_token_ids=[2**31 - 1 - i for i in range(65_536)],
            seed=2**64 - 1,
        ),
        stopping=pb.StoppingParams(stop=["x" * 256] * 16, stop_token_ids=[2**31 - 1] * 256, max_tokens=2**32 - 1),
        annotation=bytes(MOST_ANNOTATION_BYTES),
    )
    check_of(pb.GenerateRequest.DESCRIPTOR).check(request)
    assert request.ByteSize() < MOST_PARAMETER_BYTES * 3 // 4
