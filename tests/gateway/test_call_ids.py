"""Ids of calls in a conversation: of any form, and for Mistral's templates made of nine characters."""

from typing import Any

import httpx2
import pytest

import quire
from gateway_svc.app import create_app
from quire.results import PinnedPrefix
from quire.stream import CompletionStream
from tests.gateway.raw_http import served
from tests.gateway.scripted_client import Scripted, ScriptedClient, chunks_of
from tests.patience import patient

STREAMED = {"/v1/chat/completions": {"stream": True}}  # scripted chunks are not parsed
CALL = {"name": "f", "arguments": "{}"}


def chat(call_id: str) -> list[dict[str, Any]]:
    """A conversation with a call and its result."""
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": CALL}]},
        {"role": "tool", "tool_call_id": call_id, "content": "y"},
    ]


def items(call_id: str) -> list[dict[str, Any]]:
    """The same as items of a response."""
    return [
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": call_id, **CALL},
        {"type": "function_call_output", "call_id": call_id, "output": "y"},
    ]


class NotingClient(ScriptedClient):
    """A client that keeps the messages of each conversation that it is given."""

    def __init__(self, tool_parser: str) -> None:
        super().__init__(Scripted(chunks=chunks_of(["a"]), model={"tool_parser": tool_parser}))
        self.seen: list[quire.ChatMessage] = []

    def stream_chat(self, messages: Any, **params: Any) -> CompletionStream:
        self.seen = list(messages)
        return super().stream_chat(messages, **params)

    async def tokenize(self, text: Any, **more: Any) -> quire.Tokens:
        self.seen = list(text.messages)
        return await super().tokenize(text, **more)

    async def pin_prefix(self, name: str, prefix: Any, **_: Any) -> PinnedPrefix:
        self.seen = list(prefix.messages)
        raise quire.FailedPreconditionError("seen")


@pytest.mark.parametrize(
    ("method", "path", "field", "made"),
    [
        ("POST", "/v1/chat/completions", "messages", chat),
        ("POST", "/tokenize", "messages", chat),
        ("PUT", "/prefixes/p", "messages", chat),
        ("POST", "/v1/responses", "input", items),
        ("POST", "/v1/responses/input_tokens", "input", items),
    ],
)
async def test_ids_of_calls_are_made_for_the_template(method: str, path: str, field: str, made: Any) -> None:
    for tool_parser, given in (("mistral", "call_0123456789abcdef"), ("mistral", "a1B2c3D4e"), ("hermes", "call_1")):
        client = NotingClient(tool_parser)
        async with (
            served(create_app(client, max_body_bytes=1 << 20)) as port,
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=patient(30)) as http,
        ):
            answer = await http.request(method, path, json={field: made(given)} | STREAMED.get(path, {}))
        assert answer.status_code == 200 or path.startswith("/prefixes"), answer.text
        _, called, told = client.seen
        seen = called.tool_calls[0].id
        assert told.tool_call_id == seen
        assert (len(seen) == 9 and seen.isalnum()) if tool_parser == "mistral" else seen == given
        assert seen == given or len(given) != 9
