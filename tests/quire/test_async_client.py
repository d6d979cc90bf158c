"""Requests from the caller's side, while nothing goes wrong with the connection."""

import asyncio
import dataclasses
import math
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

import quire
from quire.params import GenerateParams
from quire.v1 import inference_pb2 as pb
from tests.patience import patient
from tests.quire.scripted_run import Script
from tests.quire.scripted_server import ScriptedServer
from tests.quire.spoken_answers import HERMES


async def test_generate_gives_the_whole_completion(client: quire.AsyncClient) -> None:
    completion = await client.generate("hello", max_tokens=8, seed=11)

    assert completion.text == " 0 1 2 3 4 5 6 7"
    assert completion.token_ids == tuple(range(8))
    assert completion.finish_reason is quire.FinishReason.STOP
    assert completion.stop_cause == quire.StopCause(stop_string="!")
    assert completion.usage == quire.Usage(prompt_tokens=3, completion_tokens=8, cached_tokens=1)
    assert completion.timings.first_token_s == 0.002
    assert completion.timings.first_scheduled_s is None
    assert completion.seed == 11


async def test_stream_gives_each_chunk_as_it_comes(server: ScriptedServer, client: quire.AsyncClient) -> None:
    server.default = Script(num_tokens=3, released=1)
    async with client.stream("hello") as stream:
        accepted = await stream.accepted()
        assert accepted.request_id == stream.request_id
        assert accepted.num_prompt_tokens == 3
        assert (await anext(stream)).text == " 0"
        server.release(stream.request_id, 2)
        assert (await anext(stream)).text == " 1"
        server.release(stream.request_id)
        last = await anext(stream)
        assert (last.position, last.text) == (2, " 2")
        assert last.finish == quire.Finish(quire.FinishReason.STOP, quire.StopCause(stop_string="!"))
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_many_requests_interleave_over_one_session(server: ScriptedServer, client: quire.AsyncClient) -> None:
    server.default = Script(num_tokens=20, released=0)
    streams = [client.stream(f"prompt {i}") for i in range(256)]
    await asyncio.gather(*(stream.accepted() for stream in streams))
    heard: asyncio.Queue[int] = asyncio.Queue()

    async def read(index: int, stream: quire.CompletionStream) -> str:
        text = ""
        async for chunk in stream:
            heard.put_nowait(index)
            text += chunk.text
        return text

    readers = [asyncio.create_task(read(i, stream)) for i, stream in enumerate(streams)]
    for num_tokens in range(1, 21):
        for stream in streams:
            server.release(stream.request_id, num_tokens)
        async with asyncio.timeout(patient(10)):  # every reader has this token before the next one is out
            assert {await heard.get() for _ in streams} == set(range(256))
    texts = await asyncio.gather(*readers)

    assert set(texts) == {"".join(f" {i}" for i in range(20))}
    assert server.num_sessions == 1


async def test_the_parameters_reach_the_wire_in_their_groups(server: ScriptedServer, client: quire.AsyncClient) -> None:
    await client.generate(
        [4, 5, 6],
        sampling=quire.SamplingParams(temperature=0.5, top_k=3),
        top_k=7,
        logit_bias={5: -1.5},
        stop="end",
        min_tokens=2,
        logprobs=0,
        request_id="mine",
        tenant="acme",
        cache_salt="pepper",
        timeout_s=1.5,
        on_disconnect=quire.OnDisconnect.CONTINUE,
    )
    sent = server.runs["mine"].request

    assert list(sent.token_ids.ids) == [4, 5, 6]
    assert (sent.sampling.temperature, sent.sampling.top_k) == (0.5, 7)  # the flat keyword wins
    assert not sent.sampling.HasField("top_p")
    assert dict(sent.sampling.logit_bias) == {5: -1.5}
    assert list(sent.stopping.stop) == ["end"]
    assert sent.stopping.min_tokens == 2
    assert sent.output.HasField("logprobs")
    assert sent.output.logprobs == 0
    assert (sent.tenant, sent.cache_salt, sent.timeout_ms) == ("acme", "pepper", 1500)
    assert sent.on_disconnect == pb.ON_DISCONNECT_CONTINUE


async def test_chat_sends_every_turn(server: ScriptedServer, client: quire.AsyncClient) -> None:
    messages: list[quire.ChatMessage | dict[str, str]] = [
        quire.ChatMessage("system", "Be brief."),
        {"role": "user", "content": "Hi"},
    ]
    completion = await client.chat(messages)
    sent = server.runs[completion.request_id].request.chat

    assert [(each.role, each.content) for each in sent.messages] == [("system", "Be brief."), ("user", "Hi")]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"top_k": "many"}, "top_k"),
        ({"stop": [b"\xff"]}, "stop"),
        ({"stop_token_ids": [1 << 40]}, "stop_token_ids"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": math.nan}, "timeout_s"),
    ],
)
async def test_a_value_its_field_cannot_carry_is_refused_by_name(
    client: quire.AsyncClient, params: dict[str, object], field: str
) -> None:
    with pytest.raises(quire.InvalidRequestError) as caught:
        await client.generate("hello", **params)  # type: ignore[arg-type]
    assert caught.value.violations[0].field == field


async def test_text_that_is_not_unicode_is_refused_and_nothing_else_notices(client: quire.AsyncClient) -> None:
    with pytest.raises(quire.InvalidRequestError, match="prompt"):
        await client.generate("\udcff")
    assert (await client.generate("hello")).text.startswith(" 0")


async def test_a_prompt_too_large_for_a_message_is_refused_alone(client: quire.AsyncClient) -> None:
    with client_stream_open(client) as other, pytest.raises(quire.InvalidRequestError, match="bytes"):
        await client.generate("x" * (17 * 1024 * 1024))
    assert (await other.completion()).text.startswith(" 0")


class client_stream_open:
    """A stream that is open while the block runs."""

    def __init__(self, client: quire.AsyncClient) -> None:
        self._stream = client.stream("other")

    def __enter__(self) -> quire.CompletionStream:
        return self._stream

    def __exit__(self, *_: object) -> None:
        pass


async def test_an_unknown_parameter_is_refused_with_the_nearest_name(client: quire.AsyncClient) -> None:
    with pytest.raises(TypeError, match="did you mean 'max_tokens'"):
        await client.generate("hello", max_token=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no option 'timeout'; did you mean 'timeout_s'"):
        quire.AsyncClient(timeout=3)  # type: ignore[call-arg]


async def test_what_is_no_message_and_what_is_no_format_are_refused_by_name(client: quire.AsyncClient) -> None:
    """Regression: AttributeError, as of a message that another library had made."""
    for message in (None, "Hi", SimpleNamespace(role="user", content="Hi")):
        messages: Any = [{"role": "user", "content": "Hi"}, message]
        with pytest.raises(quire.InvalidRequestError, match=r"messages\[1\]: must be a ChatMessage or a dict"):
            await client.chat(messages)
        with pytest.raises(quire.InvalidRequestError, match=r"\[1\]: must be a ChatMessage or a dict"):
            await client.tokenize(messages)
    with pytest.raises(TypeError, match="answer_format must be AnswerFormat"):
        await client.chat(messages[:1], answer_format="hermes")  # type: ignore[arg-type]


async def test_calls_of_a_message_are_dicts_or_tool_calls_wherever_they_stand(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    """Regression: dicts among the calls of a ChatMessage were an AttributeError."""
    call = {"id": "1", "name": "weather", "arguments": "{}"}
    for message in (
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "tool_calls": (quire.ToolCall(**call),)},
        quire.ChatMessage("assistant", tool_calls=[call]),  # type: ignore[list-item]
        quire.ChatMessage("assistant", tool_calls=[quire.ToolCall(**call)]),
    ):
        sent = server.runs[(await client.chat([message])).request_id].request.chat
        assert [(each.id, each.name, each.arguments) for each in sent.messages[0].tool_calls] == [
            ("1", "weather", "{}")
        ]
    for calls, told in (
        (5, r"tool_calls: must be a list of calls, not int"),
        (None, r"tool_calls: must be a list of calls, not NoneType"),
        (call, r"tool_calls: must be a list of calls, not dict"),
        ([5], r"tool_calls\[0\]: must be a ToolCall, or a dict"),
        ([{**call, "arguments": {}}], r"tool_calls\[0\]\.arguments: cannot be \{\}: give a text"),
    ):
        given: Any = {"role": "assistant", "content": "", "tool_calls": calls}
        for wrong in (given, quire.ChatMessage(**given)):
            with pytest.raises(quire.InvalidRequestError, match=r"^messages\[0\]\." + told):
                await client.chat([wrong])


class RefusingTokenizer(ScriptedServer):
    """Server that refuses what is tokenised, by the paths of its fields on the wire."""

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        field = "text" if request.WhichOneof("input") == "text" else "chat.messages[0].role"
        raise quire.InvalidRequestError.of([quire.FieldViolation(field, "is refused")])


async def test_what_is_tokenised_is_refused_by_its_keyword() -> None:
    """Regression: the server's words named fields of the wire, and the client's a prompt."""
    server = RefusingTokenizer()
    await server.start()
    try:
        async with quire.AsyncClient(server.address) as client:
            for text, told in (
                ("Hi", "^text: is refused"),
                ([quire.ChatMessage("user", "Hi")], r"^messages\[0\]\.role: is refused"),
                ("\udcff", "^text: has characters that UTF-8 cannot encode"),
                ([quire.ChatMessage("user", "\udcff")], r"^messages\[0\]\.content: has characters"),
            ):
                with pytest.raises(quire.InvalidRequestError, match=told):
                    await client.tokenize(text)
            with pytest.raises(
                quire.InvalidRequestError, match=r"^add_special_tokens: cannot be 'no': give True or False"
            ):
                await client.tokenize("Hi", add_special_tokens="no")  # type: ignore[arg-type]
    finally:
        await server.stop()


async def test_bytes_are_no_prompt_and_a_number_no_conversation(client: quire.AsyncClient) -> None:
    with pytest.raises(TypeError, match="not bytes"):
        await client.generate(b"hello")
    with pytest.raises(TypeError, match="messages must be a list"):
        await client.tokenize(5)  # type: ignore[arg-type]


def test_what_is_public_goes_by_its_public_name() -> None:
    assert quire.InvalidRequestError.__module__ == quire.Client.__module__ == "quire"


@pytest.mark.parametrize(
    ("state", "kind", "message"),
    [
        (pb.REQUEST_STATE_FAILED, quire.RequestFailedError, "the worker burnt down"),
        (pb.REQUEST_STATE_EXPIRED, quire.RequestExpiredError, "deadline"),
        (pb.REQUEST_STATE_CANCELLED, quire.RequestCancelledError, "cancelled"),
    ],
)
async def test_a_request_that_ends_badly_raises_after_its_output(
    server: ScriptedServer,
    client: quire.AsyncClient,
    state: pb.RequestState.ValueType,
    kind: type[quire.QuireError],
    message: str,
) -> None:
    server.default = Script(num_tokens=4, state=state, error="the worker burnt down")
    texts = []
    with pytest.raises(kind, match=message):
        async for chunk in client.stream("hello"):
            texts.append(chunk.text)  # noqa: PERF401 - the iteration raises
    assert "".join(texts) == " 0 1 2 3"


async def test_refusals_carry_their_details(server: ScriptedServer, client: quire.AsyncClient) -> None:
    violation = quire.FieldViolation("sampling.top_p", "must be above 0")
    server.default = Script(refusals=[quire.InvalidRequestError.of([violation])])
    with pytest.raises(quire.InvalidRequestError) as caught:
        await client.generate("hello")
    assert caught.value.violations == (quire.FieldViolation("top_p", "must be above 0"),)
    assert caught.value.message == "top_p: must be above 0"


async def test_an_overloaded_server_is_asked_again_until_it_accepts(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    server.default = Script(refusals=[quire.OverloadedError("full", 0.01), quire.UnavailableError("soon", 0.01)])
    completion = await client.generate("hello", request_id="patient")
    assert completion.text.startswith(" 0")
    assert server.count("submit", "patient") == 3


async def test_retries_end_and_the_refusal_says_when_to_come_back(server: ScriptedServer) -> None:
    server.default = Script(refusals=[quire.OverloadedError("the queue is full", 0.05) for _ in range(9)])
    async with quire.AsyncClient(server.address, retries=2) as client:
        with pytest.raises(quire.OverloadedError, match="the queue is full") as caught:
            await client.generate("hello", request_id="eager")
    assert caught.value.retry_after_s == 0.05
    assert server.count("submit", "eager") == 3


async def test_a_retry_that_would_miss_the_deadline_is_not_made(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    server.default = Script(refusals=[quire.OverloadedError("full", 60.0)])
    with pytest.raises(quire.OverloadedError):
        await client.generate("hello", timeout_s=0.5, request_id="hurried")
    assert server.count("submit", "hurried") == 1


async def test_leaving_a_stream_cancels_its_request(server: ScriptedServer, client: quire.AsyncClient) -> None:
    server.default = Script(num_tokens=9, released=1)
    async with client.stream("hello", request_id="left") as stream:
        await anext(stream)
    await server.until(lambda: server.count("cancel", "left") == 1)
    assert server.runs["left"].state == pb.REQUEST_STATE_CANCELLED


async def test_a_loop_left_early_cancels_its_request(server: ScriptedServer, client: quire.AsyncClient) -> None:
    server.default = Script(num_tokens=9, released=1)
    async for _ in client.stream("hello", request_id="broken-off"):
        break
    await server.until(lambda: server.count("cancel", "broken-off") == 1)


async def test_a_prompt_is_not_kept_once_the_server_has_it(server: ScriptedServer, client: quire.AsyncClient) -> None:
    """Regression: a client with many open requests had the prompts of all until they ended."""
    server.default = Script(num_tokens=2, released=1)
    stream = client.stream("x" * 1000, request_id="long")
    await stream.accepted()
    assert client._deployment is not None
    (entry,) = client._deployment.first.session._entries.values()
    assert entry.submission is None and entry.is_own
    server.break_sessions()
    await server.until(lambda: server.count("attach", "long") == 1)
    server.release("long")
    assert (await stream.completion()).text == " 0 1"


async def test_waits_for_output_that_are_given_up_leave_nothing(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    """Regression: a stream that is looked at for a moment again and again kept each of its waits until output came."""
    server.default = Script(num_tokens=2, released=0)
    stream = client.stream("hello", request_id="slow")
    await stream.accepted()
    for _ in range(20):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await anext(stream)
    assert not stream._request._waiters
    server.release("slow")
    assert (await stream.completion()).text == " 0 1"


async def test_cancelling_a_generate_call_cancels_its_request(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    server.default = Script(num_tokens=9, released=1)
    task = asyncio.create_task(client.generate("hello", request_id="dropped"))
    await server.until(lambda: server.count("submit", "dropped") == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await server.until(lambda: server.count("cancel", "dropped") == 1)


async def test_leaving_an_attached_stream_only_detaches(server: ScriptedServer, client: quire.AsyncClient) -> None:
    server.default = Script(num_tokens=9, released=2)
    owner = client.stream("hello", request_id="shared")
    await owner.accepted()
    async with client.attach("shared", from_position=1) as reader:
        assert (await anext(reader)).text == " 1"
    await server.until(lambda: server.count("detach", "shared") == 1)
    server.release("shared")
    assert (await owner.completion()).text == "".join(f" {i}" for i in range(9))


async def test_a_stream_that_is_detached_leaves_its_own_request_alone(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    server.default = Script(num_tokens=9, released=2)
    stream = client.stream("hello", request_id="left")
    await anext(stream)
    assert stream.outcome is None
    stream.detach()
    await server.until(lambda: server.count("detach", "left") == 1)
    server.release("left")
    again = client.attach("left")
    text = (await again.completion()).text
    assert text == "".join(f" {i}" for i in range(9))
    assert again.outcome is not None and again.outcome.state is quire.RequestState.FINISHED
    assert server.count("cancel", "left") == 0


async def test_attaching_to_an_unknown_request_is_not_found(client: quire.AsyncClient) -> None:
    with pytest.raises(quire.NotFoundError, match="nobody"):
        await client.attach("nobody").completion()


async def test_a_deadline_that_the_server_does_not_keep_is_kept_here(server: ScriptedServer) -> None:
    server.default = Script(silent=True)
    async with quire.AsyncClient(server.address) as client:
        with pytest.raises(quire.RequestExpiredError, match=r"deadline passed before the server at 127\.0\.0\.1"):
            await client.generate("hello", timeout_s=0.05, request_id="late")
        await server.until(lambda: server.count("cancel", "late") == 1)


async def test_closing_the_client_detaches_without_cancelling(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=9, released=1)
    client = quire.AsyncClient(server.address)
    stream = client.stream("hello", request_id="orphan")
    await stream.accepted()
    await client.close()
    await server.until(lambda: server.count("end-of-session", "") == 1)

    assert server.count("detach", "orphan") == 1
    assert server.runs["orphan"].state == pb.REQUEST_STATE_RUNNING
    with pytest.raises(quire.RequestCancelledError, match="closed"):
        await stream.completion()
    with pytest.raises(RuntimeError, match="closed"):
        client.stream("more")


async def test_the_other_calls_answer_in_plain_data(server: ScriptedServer, client: quire.AsyncClient) -> None:
    completion = await client.generate("hello", tenant="acme", annotation=b"\0note")
    record = await client.get(completion.request_id)
    assert (record.state, record.tenant, record.text) == (quire.RequestState.FINISHED, "acme", completion.text)
    assert record.annotation == b"\0note"
    assert await client.cancel(completion.request_id) is quire.RequestState.FINISHED
    assert await client.tokenize("a b") == quire.Tokens((0, 1), ("a", "b"))
    assert (await client.tokenize([quire.ChatMessage("user", "x y z")])).tokens == ("x", "y", "z")
    assert await client.detokenize([3, 4]) == " 3 4"
    assert await client.token_pieces([3, 4]) == (b" 3", b" 4")
    assert (await client.model()).name == "scripted"
    assert await client.health() is quire.Health.SERVING
    with pytest.raises(quire.NotFoundError, match="nope"):
        await client.get("nope")
    await client.delete_record(completion.request_id)
    with pytest.raises(quire.NotFoundError):
        await client.delete_record(completion.request_id)
    with pytest.raises(quire.NotFoundError, match="nothing"):
        await client.health("nothing")


async def test_places_of_tokens_in_the_text_come_if_asked_for(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    server.default = Script(num_tokens=5, tokens_per_chunk=2)
    async with client.stream("hello", text_ends=True) as stream:
        assert (await stream.accepted()).created_unix_s == 1e9
        ends = [chunk.text_ends async for chunk in stream]
    assert ends == [(2, 4), (2, 4), (2,)]
    async with client.stream("hello") as stream:
        assert {chunk.text_ends async for chunk in stream} == {()}


async def test_stats_derive_waste_split_saving_and_hit_rate(client: quire.AsyncClient) -> None:
    stats = await client.stats()
    blocks = stats.blocks
    assert blocks.waste == 24 / 480  # 30 used blocks of 16 slots
    assert blocks.prefix_hit_rate == 0.25
    # 1,600 slots; 16 are the rest of last blocks, 8 wait for tokens that exist, 70 blocks hold nothing
    assert blocks.split == quire.SlotSplit(
        token_states=456 / 1600, reservation=8 / 1600, internal_fragmentation=16 / 1600, free=1 - 480 / 1600
    )
    assert blocks.saving == 12 / 40  # sequences hold 28 blocks, and would hold 12 more
    assert (blocks.pinned, blocks.shared) == (2, 4)
    assert quire.BlockStats().waste is None
    assert quire.BlockStats().split is None
    assert quire.BlockStats().saving is None
    assert quire.BlockStats().prefix_hit_rate is None


async def test_stats_tell_what_was_done_when_memory_was_short(client: quire.AsyncClient) -> None:
    (worker,) = (await client.stats()).workers
    assert (worker.num_preemptions, worker.num_swaps, worker.recomputed_tokens) == (5, 3, 70)
    assert (worker.used_host_blocks, worker.host_blocks) == (6, 64)
    assert (worker.swapped_out_blocks, worker.swapped_in_blocks, worker.copied_blocks) == (18, 12, 9)
    assert (worker.swap_blocks_per_s, worker.prefill_tokens_per_s) == (None, 4000.0)


async def test_pools_add_up_field_by_field(client: quire.AsyncClient) -> None:
    blocks = (await client.stats()).blocks
    both = blocks + blocks
    doubled = {field.name: 2 * getattr(blocks, field.name) for field in dataclasses.fields(blocks)}
    assert both == quire.BlockStats(**{**doubled, "block_size": 16})


async def test_a_call_refused_for_now_is_made_again(server: ScriptedServer, client: quire.AsyncClient) -> None:
    server.refuse_calls = [quire.UnavailableError("no worker yet", 0.01) for _ in range(2)]
    assert (await client.model()).name == "scripted"


async def test_a_call_that_stays_refused_ends_within_its_time(server: ScriptedServer) -> None:
    server.refuse_calls = [quire.OverloadedError("you have too many pins", 60.0) for _ in range(9)]
    async with quire.AsyncClient(server.address, call_timeout_s=5.0) as client:
        with pytest.raises(quire.OverloadedError, match="too many pins"):
            await asyncio.wait_for(client.model(), patient(5.0))
    assert len(server.refuse_calls) == 8


async def test_a_reader_with_the_smallest_buffer_gets_everything(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=9, tokens_per_chunk=3)
    async with quire.AsyncClient(server.address, buffer_tokens=1) as client:
        assert (await client.generate("hello")).token_ids == tuple(range(9))


async def test_a_message_without_a_text_is_refused(client: quire.AsyncClient) -> None:
    for name, turn in (("content", {"role": "user", "content": None}), ("role", {"role": None, "content": "Hi"})):
        with pytest.raises(quire.InvalidRequestError, match=rf"messages\[0\]\.{name}"):
            await client.chat([turn])


async def test_wait_ready_does_not_say_that_a_silent_server_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with quire.AsyncClient(address) as client:
            with pytest.raises(quire.UnavailableError, match=f"not ready after 0.1 s: the server at {address} has not"):
                await client.wait_ready(0.1)


async def test_wait_ready_waits_for_the_worker(server: ScriptedServer, client: quire.AsyncClient) -> None:
    await server.set_ready(False)
    assert await client.health() is quire.Health.NOT_SERVING  # it is connected from here on
    with pytest.raises(quire.UnavailableError, match="no worker"):
        await client.wait_ready(patient(0.5))
    waiting = asyncio.create_task(client.wait_ready(patient(10)))
    await server.set_ready(True)
    await waiting


@pytest.mark.parametrize("refusal", [quire.OverloadedError("busy", 60.0), quire.UnavailableError("not yet", 60.0)])
async def test_wait_ready_waits_until_looks_at_health_are_not_refused(
    server: ScriptedServer, client: quire.AsyncClient, refusal: quire.RetryableError
) -> None:
    server.refuse_health += [refusal, refusal]
    await client.wait_ready(patient(20))
    assert not server.refuse_health
    server.refuse_health += [refusal] * 10_000
    with pytest.raises(quire.UnavailableError, match=f"not ready after .* s: .*{refusal.message}"):
        await client.wait_ready(0.5)


@pytest.mark.parametrize("tool", [5, None, {}, {"function": None}, {"function": {"name": None}}])
async def test_tools_without_names_are_left_to_the_server_to_refuse(
    server: ScriptedServer, client: quire.AsyncClient, tool: Any
) -> None:
    message = {"role": "user", "content": "Hi"}
    server.default = Script(refusals=[quire.InvalidRequestError("chat.tools: must be objects")])
    stream = client.stream_chat([message], tools=[tool], answer_format=HERMES, request_id="odd")
    with pytest.raises(quire.InvalidRequestError, match=r"^(chat\.)?tools: must be objects"):
        await stream.completion()


CONSTRAINED: list[GenerateParams] = [
    {"json_schema": {"type": "object"}},
    {"json_object": True},
    {"regex": "[ 0-9]+"},
    {"structured_output": quire.StructuredOutput(choice=[" 0 1", " 1 0"])},
]


@pytest.mark.parametrize("constraint", CONSTRAINED)
async def test_what_a_constraint_keeps_from_ending_is_content_though_the_prompt_opens_reasoning(
    server: ScriptedServer, client: quire.AsyncClient, constraint: GenerateParams
) -> None:
    server.default = Script(num_tokens=2, in_reasoning=True)
    completion = await client.chat([{"role": "user", "content": "Hi"}], answer_format=HERMES, **constraint)
    assert completion.samples[0].message == quire.ChatMessage("assistant", " 0 1")


@pytest.mark.parametrize("free", [GenerateParams(), GenerateParams(lark='start: /(?s:.*)/ "</think>" "yes"')])
async def test_what_may_end_the_reasoning_that_the_prompt_opens_begins_as_reasoning(
    server: ScriptedServer, client: quire.AsyncClient, free: GenerateParams
) -> None:
    server.default = Script(num_tokens=2, in_reasoning=True)
    completion = await client.chat([{"role": "user", "content": "Hi"}], answer_format=HERMES, **free)
    assert completion.samples[0].message == quire.ChatMessage("assistant", reasoning="0 1")


async def test_a_client_is_refused_in_another_event_loop_than_that_of_its_first_call(
    client: quire.AsyncClient,
) -> None:
    await client.tokenize("a b")
    with pytest.raises(RuntimeError, match="make one for each loop"):
        await asyncio.to_thread(asyncio.run, client.tokenize("a b"))
    await client.tokenize("a b")


async def test_a_stream_is_refused_in_another_event_loop_than_that_in_which_it_was_opened(
    client: quire.AsyncClient,
) -> None:
    stream = client.stream("a b")
    for ask in (stream.completion, stream.accepted, stream.__anext__):
        with pytest.raises(RuntimeError, match="the stream belongs to the event loop in which it was opened"):
            await asyncio.to_thread(asyncio.run, _call(ask))
    assert (await stream.completion()).text


async def _call(ask: Callable[[], Awaitable[Any]]) -> Any:
    return await ask()
