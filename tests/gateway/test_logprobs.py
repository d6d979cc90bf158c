"""Log-probabilities: offsets where tokens are parts of characters, and answers with very many of them."""

import asyncio
from dataclasses import replace
from typing import Any

import orjson
import pytest

import quire
from gateway_svc.app import create_app
from gateway_svc.openai.logprobs import CompletionLogprobs
from gateway_svc.single_tokens import MOST_AT_ONCE
from gateway_svc.vocabulary import Vocabulary
from tests.gateway.scripted_client import Scripted, ScriptedClient, chunks_of
from tests.gateway.wire import WiredCall


class Pieces(Vocabulary):
    """Pieces by their places."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = dict(enumerate(pieces))


@pytest.mark.parametrize(
    ("pieces", "offsets"),
    [
        ([b"a", "é".encode(), b"b"], [0, 1, 2]),
        ([b"a", b"\xc3", b"\xa9", b"b"], [0, 1, 1, 2]),
        ([b"a", b"\xc3", b"b", b"c"], [0, 1, 2, 3]),
        ([b"\xf0\x9f", b"\xc3", b"\xa9x", b"y"], [0, 1, 1, 3]),
        ([b"\x80", b"a", b"", b"b"], [0, 1, 2, 2]),
    ],
)
def test_an_offset_is_that_of_the_token_also_behind_an_incomplete_character(
    pieces: list[bytes], offsets: list[int]
) -> None:
    of_output = CompletionLogprobs(Pieces(pieces), 0, as_ids=False)
    tokens = [quire.TokenLogprobs(token_id=number, logprob=-1.0, rank=1, top=()) for number in range(len(pieces))]
    made = of_output.tokens(tokens)
    assert made["text_offset"] == offsets
    text = b"".join(pieces).decode(errors="replace")
    for offset, token in zip(offsets, made["tokens"], strict=True):
        assert "\ufffd" in token or text[offset:].startswith(token)


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
RESPONSE: dict[str, Any] = {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
NUM_SLICES = 10


async def answered(path: str, body: dict[str, Any], num_tokens: int, **headers: str) -> tuple[bytes, int]:
    """The answer whose prompt and output have so many tokens, and the turns that others had meanwhile."""
    [chunk] = chunks_of(["a"] * num_tokens, sizes=[num_tokens], num_top=2, has_ids=True, has_ends=True)
    client = ScriptedClient(Scripted(chunks=[replace(chunk, prompt_logprobs=chunk.logprobs)]))
    call = WiredCall(path=path, body=orjson.dumps(body), **headers)
    app = create_app(client, max_body_bytes=1 << 20)
    num_turns = 0

    async def others() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    going_on = asyncio.create_task(others())
    await call.answer(app)
    going_on.cancel()
    return call.wire.body, num_turns


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "logprobs": 2}),
        ("/v1/completions", {"prompt": "x", "logprobs": 2, "echo": True, "max_tokens": 0}),
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": 2}),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", CHAT | {"prompt_logprobs": 2}),
        ("/v1/responses", RESPONSE),
    ],
)
async def test_other_answers_go_on_while_many_log_probabilities_are_made(path: str, body: dict[str, Any]) -> None:
    _, least = await answered(path, body, 1)
    data, num_turns = await answered(path, body, NUM_SLICES * MOST_AT_ONCE)
    assert num_turns - least >= NUM_SLICES - 1
    answer = orjson.loads(data)
    if "input" in body:
        made = answer["output"][0]["content"][0]["logprobs"]
    elif "prompt_logprobs" in body:
        made = (answer if "messages" in body else answer["choices"][0])["prompt_logprobs"][1:]
    elif "messages" in body:
        made = answer["choices"][0]["logprobs"]["content"]
    else:
        made = answer["choices"][0]["logprobs"]["tokens"]
    assert len(made) == NUM_SLICES * MOST_AT_ONCE + ("echo" in body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "logprobs": 2}),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
        ("/v1/responses", RESPONSE),
    ],
)
async def test_other_answers_go_on_while_many_events_with_log_probabilities_are_made(
    path: str, body: dict[str, Any]
) -> None:
    """Events are of single tokens, of which very many come at once where a client comes back for its stream."""
    streamed = body | {"stream": True}
    _, least = await answered(path, streamed, 1, idempotency_key="k")
    data, num_turns = await answered(path, streamed, NUM_SLICES * MOST_AT_ONCE, idempotency_key="k")
    assert num_turns - least >= NUM_SLICES - 1
    assert data.count(b"id: ") >= NUM_SLICES * MOST_AT_ONCE


async def test_other_answers_go_on_while_a_stream_echoes_a_long_prompt_with_its_log_probabilities() -> None:
    body = {"prompt": "x", "logprobs": 2, "echo": True, "stream": True}
    _, least = await answered("/v1/completions", body, 1)
    data, num_turns = await answered("/v1/completions", body, NUM_SLICES * MOST_AT_ONCE)
    assert num_turns - least >= NUM_SLICES - 1
    [event] = [line for line in data.split(b"\n") if line.startswith(b'data: {"')]
    [choice] = orjson.loads(event.removeprefix(b"data: "))["choices"]
    assert len(choice["logprobs"]["tokens"]) == 1 + 2 * NUM_SLICES * MOST_AT_ONCE
