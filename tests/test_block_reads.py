"""Frames of blocks are the messages of the proto, and keys of reads say what may be read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.block_reads import has_read_key, make_frame, open_frame, read_key
from quire.checksum import is_intact, sealed, tag_of
from quire.errors import DataLossError
from quire.v1 import worker_pb2 as pb

TAG = tag_of(pb.ReadBlocksResponse.DESCRIPTOR)
REQUEST = pb.ReadBlocksRequest(epoch=3, incarnation="life", block_ids=b"\1\0\0\0")

firsts = st.sampled_from([0, 1, 127, 128, 16_383, 16_384, 2**21, 2**32 - 1])
contents = st.binary(min_size=0, max_size=300)


@given(firsts, contents)
def test_a_frame_is_the_sealed_message_that_protobuf_makes_of_it(first: int, blocks: bytes) -> None:
    message = pb.ReadBlocksResponse(first=first, blocks=blocks)
    frame = make_frame(first, memoryview(blocks))
    assert pb.ReadBlocksResponse.FromString(frame[:-5]) == message
    assert is_intact(frame, TAG)
    if blocks:  # protobuf leaves empty ones out
        assert frame == sealed(message, TAG)
    opened = open_frame(frame)
    assert (opened.first, bytes(opened.blocks)) == (first, blocks)


@given(firsts, contents, st.integers(0, 7), st.data())
def test_any_flipped_bit_is_noticed(first: int, blocks: bytes, bit: int, data: st.DataObject) -> None:
    frame = bytearray(make_frame(first, blocks))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << bit
    with pytest.raises(DataLossError):
        open_frame(bytes(frame))


@given(st.binary(max_size=40))
def test_no_other_sealed_bytes_are_taken_for_a_frame(data: bytes) -> None:
    class Message:
        def SerializeToString(self) -> bytes:
            return data

    sealed_data = sealed(Message(), TAG)
    try:
        opened = open_frame(sealed_data)
    except DataLossError:
        return
    parsed = pb.ReadBlocksResponse.FromString(sealed_data)
    assert (parsed.first, parsed.blocks) == (opened.first, bytes(opened.blocks))


@pytest.mark.parametrize("data", [b"", b"x", b"\x1d\0\0\0", sealed(pb.ReadBlocksResponse(first=4), TAG)])
def test_what_has_no_blocks_is_no_frame(data: bytes) -> None:
    with pytest.raises(DataLossError):
        open_frame(data)


def test_a_key_is_for_one_read_of_one_worker_alone() -> None:
    request = pb.ReadBlocksRequest()
    request.CopyFrom(REQUEST)
    request.read_key = read_key("secret", 3, "life", b"\1\0\0\0")
    assert has_read_key(request, "secret")
    assert not has_read_key(request, "another")
    for name, value in {"epoch": 4, "incarnation": "lif", "block_ids": b"\2\0\0\0"}.items():
        other = pb.ReadBlocksRequest()
        other.CopyFrom(request)
        setattr(other, name, value)
        assert not has_read_key(other, "secret"), name
    for key in ("", request.read_key[:-1], request.read_key.upper(), "é"):
        request.read_key = key
        assert not has_read_key(request, "secret")
