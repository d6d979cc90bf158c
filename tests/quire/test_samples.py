"""Requests with several samples: what is asked, what comes back, and what of it survives a break."""

from typing import Any

import pytest

import quire
from quire.v1 import inference_pb2 as pb
from tests.quire.scripted_run import Script
from tests.quire.scripted_server import ScriptedServer


def text_of(index: int, num_tokens: int) -> str:
    return "".join(f" {1000 * index + i}" for i in range(num_tokens))


def positions_by_sample(chunks: list[quire.Chunk]) -> dict[int, list[int]]:
    return {index: [each.position for each in chunks if each.index == index] for index in range(3)}


async def test_samples_and_priority_reach_the_wire(server: ScriptedServer, client: quire.AsyncClient) -> None:
    await client.generate(
        "hello", request_id="r", sampling=quire.SamplingParams(n=2), n=3, best_of=5, first_sample_index=4, priority=-2
    )
    sent = server.runs["r"].request
    assert (sent.sampling.n, sent.sampling.best_of, sent.sampling.first_sample_index) == (3, 5, 4)
    assert sent.priority == -2
    assert not sent.HasField("beam")

    await client.generate("hello", request_id="plain")
    assert not server.runs["plain"].request.sampling.HasField("n")  # the server's default, not ours


@pytest.mark.parametrize(
    ("early_stopping", "sent"),
    [
        (None, pb.EARLY_STOPPING_UNSPECIFIED),
        (False, pb.EARLY_STOPPING_FALSE),
        (True, pb.EARLY_STOPPING_TRUE),
        ("never", pb.EARLY_STOPPING_NEVER),
    ],
)
async def test_a_beam_search_is_asked_flat_or_as_a_group(
    server: ScriptedServer, client: quire.AsyncClient, early_stopping: Any, sent: pb.EarlyStopping.ValueType
) -> None:
    await client.generate("hello", request_id="flat", beam_width=4, length_penalty=0.0, early_stopping=early_stopping)
    group = quire.BeamParams(beam_width=2, length_penalty=0.0, early_stopping=early_stopping)
    await client.generate("hello", request_id="group", beam=group, beam_width=4)  # the flat keyword wins

    expected = pb.BeamParams(beam_width=4, length_penalty=0.0, early_stopping=sent)
    assert server.runs["flat"].request.beam == server.runs["group"].request.beam == expected


async def test_half_a_beam_search_is_refused_with_what_is_missing(client: quire.AsyncClient) -> None:
    with pytest.raises(ValueError, match="length_penalty belongs to a beam search: give beam_width as well"):
        client.stream("hello", length_penalty=1.4)
    with pytest.raises(ValueError, match="early_stopping belongs"):
        client.stream("hello", early_stopping=False)
    with pytest.raises(TypeError, match="beam must be BeamParams, not int"):
        client.stream("hello", beam=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"n": -1}, "n"),
        ({"best_of": "many"}, "best_of"),
        ({"beam_width": 1 << 40}, "beam_width"),
        ({"beam_width": 4, "length_penalty": "long"}, "length_penalty"),
        ({"beam_width": 4, "early_stopping": "soon"}, "early_stopping"),
        ({"priority": 1 << 40}, "priority"),
    ],
)
async def test_a_value_its_field_cannot_carry_is_refused_by_name(
    client: quire.AsyncClient, params: Any, field: str
) -> None:
    with pytest.raises(quire.InvalidRequestError) as caught:
        client.stream("hello", **params)
    assert caught.value.violations[0].field == field


async def test_a_completion_holds_every_sample_and_speaks_for_the_first(client: quire.AsyncClient) -> None:
    completion = await client.generate("hello", n=3, first_sample_index=4)

    assert [each.index for each in completion.samples] == [0, 1, 2]
    assert [each.text for each in completion.samples] == [text_of(index, 8) for index in range(3)]
    assert completion.samples[2].token_ids == tuple(range(2000, 2008))
    assert [each.sample_index for each in completion.samples] == [4, 5, 6]
    assert {each.score for each in completion.samples} == {None}  # nothing was ranked
    first = completion.samples[0]
    assert (completion.text, completion.token_ids) == (first.text, first.token_ids)
    assert completion.finish_reason is first.finish_reason is quire.FinishReason.STOP
    assert completion.stop_cause == first.stop_cause == quire.StopCause(stop_string="!")
    assert completion.usage.completion_tokens == 24
    assert completion.memory == quire.RequestMemory(
        blocks=6, shared_blocks=2, saved_blocks=4, copied_blocks=3, swapped_out_blocks=5
    )
    assert completion.memory.saving == 0.4  # 4 of the 6 + 4 that it would hold without sharing
    assert quire.RequestMemory().saving is None


async def test_samples_stream_by_turns_and_each_ends_for_itself(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    server.default = Script(num_tokens=4, released=1)
    stream = client.stream("hello", n=2, request_id="r")
    assert (await stream.accepted()).num_samples == 2
    chunks = [await anext(stream) for _ in range(2)]
    server.release("r", index=1)
    chunks.append(await anext(stream))
    server.release("r", 3, index=0)
    chunks.append(await anext(stream))
    server.release("r")
    chunks.append(await anext(stream))
    with pytest.raises(StopAsyncIteration):
        await anext(stream)

    assert [(each.index, each.position, each.text, each.finish is not None) for each in chunks] == [
        (0, 0, " 0", False),
        (1, 0, " 1000", False),
        (1, 1, " 1001 1002 1003", True),
        (0, 1, " 1 2", False),
        (0, 3, " 3", True),
    ]
    assert [each.text for each in (await stream.completion()).samples] == [text_of(0, 4), text_of(1, 4)]


async def test_a_beam_search_may_find_fewer_than_were_asked_for(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    server.default = Script(num_samples=2)
    async with client.stream("hello", beam_width=4, n=4) as stream:
        assert (await stream.accepted()).num_samples == 4
        completion = await stream.completion()
    assert [(each.index, each.score) for each in completion.samples] == [(0, -0.5), (1, -1.5)]
    assert completion.score == -0.5


async def test_what_did_not_end_well_says_how_much_there_was_of_all_samples(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    server.default = Script(num_tokens=4, state=pb.REQUEST_STATE_FAILED, error="the worker burnt down")
    with pytest.raises(quire.RequestFailedError, match="after 12 tokens of output: the worker burnt down"):
        await client.generate("hello", n=3)


async def test_every_sample_is_resumed_where_it_was(server: ScriptedServer, client: quire.AsyncClient) -> None:
    server.default = Script(num_tokens=6, released=0)
    stream = client.stream("hello", n=3, request_id="r")
    await stream.accepted()
    chunks = []
    for index, num_tokens in ((2, 6), (0, 2)):  # sample 2 ends, sample 1 has not begun
        server.release("r", num_tokens, index)
        chunks.append(await anext(stream))
    server.break_sessions()
    await server.until(lambda: server.count("attach", "r") == 1)
    server.release("r")
    chunks += [each async for each in stream]

    assert server.attached_at == [[], [2, 0, 6]]
    assert positions_by_sample(chunks) == {0: [0, 2], 1: [0], 2: [0]}  # nothing came twice, the end of 2 neither
    assert [each.text for each in (await stream.completion()).samples] == [text_of(index, 6) for index in range(3)]


async def test_a_slow_reader_loses_nothing_of_any_sample(server: ScriptedServer) -> None:
    server.scripts["slow"] = Script(num_tokens=100, tokens_per_chunk=1)
    async with quire.AsyncClient(server.address, buffer_tokens=16) as client:
        slow = client.stream("slow", request_id="slow", n=3, on_disconnect=quire.OnDisconnect.CONTINUE)
        await server.until(lambda: server.count("detach", "slow") == 1)
        chunks = [await anext(slow) for _ in range(16)]
        await server.until(lambda: server.count("attach", "slow") == 1)
        chunks += [each async for each in slow]
        completion = await slow.completion()

    # 16 tokens were held, of three samples by turns; the reader went on from there
    assert server.attached_at[:2] == [[], [6, 5, 5]]
    assert positions_by_sample(chunks) == {index: list(range(100)) for index in range(3)}
    assert [each.text for each in completion.samples] == [text_of(index, 100) for index in range(3)]


async def test_a_gap_in_one_sample_is_fetched_again_and_a_repetition_is_passed_over(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    server.default = Script(num_tokens=9, released=4, tokens_per_chunk=2)
    repeated = client.stream("hello", n=2, request_id="repeated")
    skipped = client.stream("hello", n=2, request_id="skipped")
    for stream in (repeated, skipped):
        for _ in range(4):
            await anext(stream)
    server.skip("repeated", -2, index=1)
    server.skip("skipped", 1, index=1)
    rest = [each async for each in repeated]
    assert positions_by_sample(rest) == {0: [4, 6, 8], 1: [4, 6, 8], 2: []}
    rest = [each async for each in skipped]
    assert positions_by_sample(rest) == {0: [4, 6, 8], 1: [4, 6, 8], 2: []}
    assert server.attached_at[-1][1] == 4  # where the gap was


async def test_an_attachment_begins_where_it_is_told_in_each_sample(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    await client.generate("hello", n=3, request_id="r")
    completion = await client.attach("r", [6, 8]).completion()
    assert [each.text for each in completion.samples] == [" 6 7", "", text_of(2, 8)]
    assert server.attached_at[-1] == [6, 8]
    assert [each.text for each in (await client.attach("r", 7).completion()).samples] == [
        " 7",
        text_of(1, 8),
        text_of(2, 8),
    ]
    with pytest.raises(quire.InvalidRequestError, match=r"^from_position: cannot be \[0, -1\]: .* from 0 to"):
        client.attach("r", [0, -1])


async def test_a_record_holds_every_sample(server: ScriptedServer, client: quire.AsyncClient) -> None:
    server.default = Script(num_tokens=4, released=2)
    async with client.stream("hello", n=2, request_id="r") as stream:
        await stream.accepted()
        server.release("r", index=1)
        record = await client.get("r")

    assert [(each.index, each.text) for each in record.samples] == [(0, " 0 1"), (1, text_of(1, 4))]
    assert (record.text, record.token_ids, record.finish) == (" 0 1", (0, 1), None)
    assert record.samples[1].finish is not None
    assert record.samples[1].finish.sample_index == 1
    assert record.memory.saved_blocks == 4
