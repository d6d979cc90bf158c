"""Steps and answers as bytes with a checksum: what was damaged on its way is never taken for what was sent."""

import struct
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from common.sampling_codec import sampling_from_pb, sampling_to_pb
from common.sampling_params import NUMERIC_PARAMS, NumericParam, SequenceSampling
from common.step import SequenceState, Step, StepResult, StepStatus
from common.step_codec import result_from_pb, result_to_pb, step_from_pb, step_to_pb
from common.step_wire import open_any_request, open_request, open_response, seal_request, seal_response
from quire.errors import DataLossError
from quire.v1 import worker_pb2 as pb

int32s = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6)
pairs = int32s.filter(lambda numbers: len(numbers) % 2 == 0)
seats = st.builds(
    SequenceState,
    seat=st.integers(0, 2**31 - 1),
    position=st.integers(0, 2**31 - 1),
    block_table=int32s,
    token_ids=int32s,
    num_prompt_tokens=st.integers(0, 2**31 - 1),
    sampling=st.builds(SequenceSampling, seed=st.integers(0, 2**64 - 1), min_p=st.floats(0, 1, width=32)),
)
steps = st.builds(
    Step,
    epoch=st.integers(0, 2**64 - 1),
    step_id=st.integers(0, 2**64 - 1),
    snapshot=st.booleans(),
    freed_seats=int32s,
    whole=st.lists(seats, max_size=2),
    append_pairs=pairs,
    rows=int32s,
    samples=st.none() | pairs,
    num_spare_positions=st.integers(0, 2**32 - 1),
)
results = st.builds(
    StepResult,
    epoch=st.integers(0, 2**64 - 1),
    step_id=st.integers(0, 2**64 - 1),
    status=st.sampled_from(StepStatus),
    error=st.text(max_size=20),
    token_ids=int32s,
    exec_ns=st.integers(0, 2**63),
    forced=st.dictionaries(st.integers(0, 2**31 - 1), int32s.filter(bool), max_size=3),
)


def flipped(data: bytes) -> "list[bytes]":
    """The bytes with each of their bits flipped, one at a time."""
    whole = int.from_bytes(data, "big")
    return [(whole ^ 1 << bit).to_bytes(len(data), "big") for bit in range(8 * len(data))]


@given(step=steps)
@settings(max_examples=25)
def test_any_single_flipped_bit_of_a_step_is_detected(step: Step) -> None:
    message = step_to_pb(step)
    sealed = seal_request(message)
    assert step_to_pb(step_from_pb(open_request(sealed))) == message
    for damaged in flipped(sealed):
        with pytest.raises(DataLossError):
            open_request(damaged)


@given(result=results)
@settings(max_examples=25)
def test_any_single_flipped_bit_of_an_answer_is_detected(result: StepResult) -> None:
    message = result_to_pb(result)
    sealed = seal_response(message)
    assert result_to_pb(result_from_pb(open_response(sealed))) == message
    for damaged in flipped(sealed):
        with pytest.raises(DataLossError):
            open_response(damaged)


@given(data=st.binary(max_size=64))
def test_bytes_that_were_never_sealed_are_not_taken(data: bytes) -> None:
    for open_sealed in (open_request, open_response):
        with pytest.raises(DataLossError):
            open_sealed(data)


def test_a_checksum_is_the_field_that_the_proto_says() -> None:
    step = seal_request(pb.StepRequest(epoch=3))
    assert pb.StepRequest.FromString(step).SerializeToString() == step
    answer = seal_response(pb.StepResponse(epoch=3))
    assert pb.StepResponse.FromString(answer).SerializeToString() == answer


def test_an_answer_is_not_taken_for_a_step_nor_a_step_for_an_answer() -> None:
    with pytest.raises(DataLossError):
        open_request(seal_response(pb.StepResponse(epoch=3)))
    with pytest.raises(DataLossError):
        open_response(seal_request(pb.StepRequest(epoch=3)))


def test_where_a_checksum_may_be_left_out_a_wrong_one_is_still_refused() -> None:
    bare = pb.StepRequest(epoch=3, rows=b"\x7d\x00\x00\x00\x00")  # ends as a message with a checksum would
    assert open_any_request(bare.SerializeToString()) == bare
    assert open_any_request(seal_request(bare)).epoch == 3
    with pytest.raises(DataLossError):
        open_any_request(pb.StepRequest(epoch=3, checksum=1).SerializeToString())
    with pytest.raises(DecodeError):
        open_any_request(b"\xff")


def test_a_step_of_a_scheduler_that_sends_no_numbers_is_refused_rather_than_sampled_with_other_ones() -> None:
    state = SequenceState(
        seat=0, position=0, block_table=[0], token_ids=[1], num_prompt_tokens=1, sampling=SequenceSampling(seed=1)
    )
    message = step_to_pb(Step(epoch=1, step_id=1, whole=[state]))
    assert step_from_pb(message).whole[0].sampling == state.sampling
    message.whole[0].sampling.ClearField("numbers")
    with pytest.raises(ValueError, match="numbers is missing"):
        step_from_pb(message)


@pytest.mark.parametrize("each", NUMERIC_PARAMS, ids=lambda each: each.name)
def test_every_number_among_the_sampling_parameters_travels(each: NumericParam) -> None:
    number: Any = int(each.trial) if each.is_whole else struct.unpack("f", struct.pack("f", each.trial))[0]
    assert number != each.default and each.allows(number)
    sampling = replace(SequenceSampling(seed=1), **{each.name: number})
    assert sampling_from_pb(sampling_to_pb(sampling)) == sampling
