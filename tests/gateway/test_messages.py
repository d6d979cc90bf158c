"""`/v1/messages` by Anthropic's own client, compared with the SDK on the same deployment."""

import json
from typing import Any, Literal

import anthropic
import httpx2
from pydantic import BaseModel

import quire
from tests.gateway.conftest import MODEL

QUESTION: list[Any] = [{"role": "user", "content": "Who are you?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "extra_body": {"temperature": 0}}
RAW: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": 40, "stop_sequences": ["e"]}


def text_of(message: anthropic.types.Message) -> str:
    [block] = message.content
    assert block.type == "text"
    return block.text


def events_of(http: httpx2.Client, fields: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Types and data of the events of a streamed message."""
    body = http.post("/v1/messages", json=fields | {"stream": True}).text
    found = []
    for event in body.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_a_message_is_the_sdks_answer(claude: anthropic.Anthropic, sdk: quire.Client) -> None:
    expected = sdk.chat(QUESTION, temperature=0, max_tokens=40)
    message = claude.messages.create(messages=QUESTION, **GREEDY)
    assert message.id.startswith("msg_")
    assert message._request_id == message.id
    assert sdk.get(message.id).text == expected.text
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert text_of(message) == expected.text
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == expected.usage.prompt_tokens
    assert (usage.output_tokens, usage.cache_creation_input_tokens) == (expected.usage.completion_tokens, 0)


def test_max_tokens_ends_a_message(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(messages=QUESTION, **GREEDY | {"max_tokens": 3})
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)


def test_a_stop_sequence_ends_a_message_and_is_named(claude: anthropic.Anthropic) -> None:
    whole = text_of(claude.messages.create(messages=QUESTION, **GREEDY))
    stop = whole[5:8]
    message = claude.messages.create(messages=QUESTION, stop_sequences=["never there", stop], **GREEDY)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == whole[: whole.index(stop)]


def test_a_message_that_ends_at_once_has_no_content(claude: anthropic.Anthropic, sdk: quire.Client) -> None:
    [eos] = sdk.model().eos_token_ids
    ended: dict[str, Any] = {"messages": QUESTION, "max_tokens": 40, "model": MODEL}
    ended["extra_body"] = {"allowed_token_ids": [eos]}
    message = claude.messages.create(**ended)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "end_turn", 1)
    with claude.messages.stream(**ended) as stream:
        assert stream.get_final_message().content == []


def test_blocks_and_messages_of_one_role_in_a_row_are_one_turn(claude: anthropic.Anthropic, sdk: quire.Client) -> None:
    turns = [
        {"role": "system", "content": "Be kind.\nBe brief."},
        {"role": "user", "content": "Hello.\nWho are\nyou?"},
    ]
    expected = sdk.chat(turns, temperature=0, max_tokens=40)
    cached: Any = {"type": "text", "text": "Who are", "cache_control": {"type": "ephemeral"}}
    message = claude.messages.create(
        system=[{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be brief."}],
        messages=[
            {"role": "user", "content": "Hello."},
            {"role": "user", "content": [cached, {"type": "text", "text": "you?"}]},
        ],
        **GREEDY,
    )
    assert text_of(message) == expected.text


def test_an_answer_goes_back_as_it_came(claude: anthropic.Anthropic) -> None:
    first = claude.messages.create(messages=QUESTION, **GREEDY)
    messages = [*QUESTION, first.to_param(), {"role": "user", "content": "Where do you live?"}]
    assert claude.messages.create(messages=messages, **GREEDY).stop_reason == "end_turn"


def test_a_prefilled_answer_is_continued(claude: anthropic.Anthropic, sdk: quire.Client) -> None:
    whole = text_of(claude.messages.create(messages=QUESTION, **GREEDY))
    begin, rest = whole[: whole.index(" ", 6)], whole[whole.index(" ", 6) :]
    prefilled = [*QUESTION, {"role": "assistant", "content": begin}]
    message = claude.messages.create(messages=prefilled, **GREEDY)
    assert text_of(message) == rest
    assert sdk.chat(prefilled, continue_final_message=True, temperature=0, max_tokens=40).text == rest


def test_an_answer_without_content_is_taken_back(claude: anthropic.Anthropic) -> None:
    taken_back = [*QUESTION, {"role": "assistant", "content": []}]
    answer, again = (claude.messages.create(messages=each, **GREEDY) for each in (QUESTION, taken_back))
    assert again.content == answer.content
    assert again.usage.output_tokens == answer.usage.output_tokens
    counted = claude.messages.count_tokens(model=MODEL, messages=taken_back)
    assert counted == claude.messages.count_tokens(model=MODEL, messages=QUESTION)


def test_the_stream_helper_gives_the_whole_message(claude: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"messages": QUESTION, **GREEDY}
    whole = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == text_of(whole)
        final = stream.get_final_message()
        assert stream.request_id == final.id
    assert text_of(final) == text_of(whole)
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert (
        final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
        == claude.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    )


def test_events_come_in_anthropics_order(http: httpx2.Client) -> None:
    events = events_of(http, RAW)
    assert [name for name, _ in events] == [data["type"] for _, data in events]
    names = [name for name, _ in events]
    num_deltas = names.count("content_block_delta")
    assert names == [
        "message_start",
        "content_block_start",
        "ping",
        *["content_block_delta"] * num_deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, delta = events[0][1]["message"], events[-2][1]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert start["usage"]["input_tokens"] > 0
    assert delta["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "e"}
    text = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    whole = http.post("/v1/messages", json=RAW).json()
    assert whole["content"] == [{"type": "text", "text": text}]


def test_tokens_are_counted_as_a_message_uses_them(claude: anthropic.Anthropic) -> None:
    inputs: list[dict[str, Any]] = [
        {"messages": QUESTION},
        {"messages": QUESTION, "system": "Be brief."},
        {"messages": [*QUESTION, {"role": "assistant", "content": "I am"}]},
    ]
    counts = []
    for each in inputs:
        usage = claude.messages.create(**each, **GREEDY).usage
        counts.append(claude.messages.count_tokens(model=MODEL, **each).input_tokens)
        assert counts[-1] == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert counts[0] < counts[2] < counts[1]


def test_tokens_that_were_cached_are_counted_apart(claude: anthropic.Anthropic) -> None:
    long: Any = [{"role": "user", "content": "The cat sat on the mat. " * 20}]
    fields = GREEDY | {"max_tokens": 1, "extra_body": {"cache_salt": "counted"}}
    first, second = (claude.messages.create(messages=long, **fields).usage for _ in range(2))
    assert first.cache_read_input_tokens == 0
    assert second.cache_read_input_tokens is not None and second.cache_read_input_tokens > 50
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens


def test_the_model_has_anthropics_form_for_its_clients(claude: anthropic.Anthropic, sdk: quire.Client) -> None:
    [model] = claude.models.list()
    assert model == claude.models.retrieve(MODEL)
    assert (model.type, model.id, model.max_input_tokens) == ("model", MODEL, sdk.model().max_model_len)


class Cat(BaseModel):
    """Answer of a test; Anthropic's client sends no bounds of lengths and numbers."""

    colour: Literal["black", "white"]
    is_old: bool


def test_a_format_is_a_schema_that_the_text_follows(claude: anthropic.Anthropic) -> None:
    message = claude.messages.parse(messages=QUESTION, output_format=Cat, model=MODEL, max_tokens=200)
    assert message.stop_reason == "end_turn"
    assert isinstance(message.parsed_output, Cat)


def test_extensions_are_fields_of_the_body(claude: anthropic.Anthropic, sdk: quire.Client) -> None:
    drawn = {"seed": 7, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "priority": 3, "tenant": "extended", "timeout_s": 60}
    expected = sdk.chat(QUESTION, max_tokens=12, temperature=1.0, ignore_eos=True, **drawn)  # type: ignore[arg-type]
    extra_body = drawn | {"temperature": 1.0, "ignore_eos": True}
    message = claude.messages.create(model=MODEL, messages=QUESTION, max_tokens=12, extra_body=extra_body)
    assert text_of(message) == expected.text
    assert sdk.get(message.id).tenant == "extended"
