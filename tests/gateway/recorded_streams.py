"""Streams of the four APIs that are compared byte by byte with recorded ones, and their recording.

    python -m tests.gateway.recorded_streams        # after a change of an event that is meant

A gateway within this process serves scripted output, and a client reads what comes over its connection.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

import quire
from gateway_svc.app import create_app
from tests.gateway.raw_http import served, talk
from tests.gateway.scripted_client import Scripted, ScriptedClient, chunks_of
from tests.quire.spoken_answers import SPOKEN

FOLDER = Path(__file__).parent / "recorded"
_CHANGING = ((rb'"created":\d+', b'"created":0000000000'), (rb"\r\ndate: [^\r]*", b"\r\ndate: -"))

PIECES = ["Once", " upon", " a", ' \u2028\u00e9"\\', "\n", "", "  ", "\U0001f600 %s", " end. ", " "]
CALLS = [SPOKEN["hermes: reasoning, content, two calls"].text[each : each + 5] for each in range(0, 300, 5)]
HERMES = {"tool_parser": "hermes", "reasoning_parser": "think"}
_COMPLETION: dict[str, Any] = {"prompt": "x", "stream": True, "max_tokens": 50}
_TURNS: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 50}
_RESPONSE: dict[str, Any] = {"input": "x", "stream": True}
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
_TOOL = {"type": "function", "function": {"name": "weather", "parameters": _PARAMETERS}}
_FLAT = {"type": "function", "name": "weather", "parameters": _PARAMETERS}
_USED = {"name": "weather", "input_schema": _PARAMETERS}
_KEY = {"idempotency-key": "key"}
_SIZES = (1, 1, 3, 1, 2)
_LENGTH = quire.Finish(quire.FinishReason.LENGTH)
_STOPPED = quire.Finish(quire.FinishReason.STOP, quire.StopCause(stop_string="END"))


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A call, and the output that it gets."""

    path: str
    body: Mapping[str, Any]
    script: Scripted
    headers: Mapping[str, str] = field(default_factory=dict)
    version: str = "1.1"

    async def answer(self) -> bytes:
        """The bytes that come over the connection, but for the time."""
        body = orjson.dumps(self.body)
        headers = {**self.headers, "content-type": "application/json", "content-length": str(len(body))}
        lines = [f"POST {self.path} HTTP/{self.version}", "host: x", "connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        app = create_app(ScriptedClient(self.script), max_body_bytes=1 << 20)
        async with served(app) as port:
            answer = await talk(port, "\r\n".join([*lines, "", ""]).encode() + body)
        for changing, fixed in _CHANGING:
            answer = re.sub(changing, fixed, answer)
        return answer


def _of(*lists: Sequence[quire.Chunk], **more: Any) -> Scripted:
    """A script in which the chunks of several samples alternate."""
    alternating = [each for found in zip(*lists, strict=True) for each in found]
    return Scripted(chunks=alternating, **more)


def _call(
    path: str, base: Mapping[str, Any], script: Scripted, headers: Mapping[str, str] = {}, **body: Any
) -> Recorded:
    return Recorded(path=path, body={**base, **body}, script=script, headers=headers)


def _completion(script: Scripted, headers: Mapping[str, str] = {}, **body: Any) -> Recorded:
    return _call("/v1/completions", _COMPLETION, script, headers, **body)


def _chat(script: Scripted, headers: Mapping[str, str] = {}, **body: Any) -> Recorded:
    return _call("/v1/chat/completions", _TURNS, script, headers, **body)


def _response(script: Scripted, headers: Mapping[str, str] = {}, **body: Any) -> Recorded:
    return _call("/v1/responses", _RESPONSE, script, headers, **body)


def _message(script: Scripted, headers: Mapping[str, str] = {}, **body: Any) -> Recorded:
    return _call("/v1/messages", _TURNS, script, headers, **body)


_PLAIN = _of(chunks_of(PIECES))
_SEVERAL = _of(chunks_of(PIECES, sizes=_SIZES, has_ends=True))
_TWO = _of(chunks_of(PIECES), chunks_of(PIECES[::-1], index=1, finish=_LENGTH))
_TWO_ENDS = _of(
    chunks_of(PIECES, sizes=_SIZES, has_ends=True), chunks_of(PIECES[::-1], sizes=_SIZES, index=1, has_ends=True)
)
_PROBABLE = _of(chunks_of(PIECES, sizes=_SIZES, num_top=2, has_ends=True))
_CALLING = _of(chunks_of(CALLS), model=HERMES)
_CALLING_ENDS = _of(chunks_of(CALLS, sizes=(3, 4, 1, 5), has_ends=True), model=HERMES)
_CALL = SPOKEN["hermes: reasoning, content, two calls"].text
_CALLING_AT_ONCE = _of(chunks_of([_CALL, ""], sizes=(2,), has_ends=True), model=HERMES)
_CALL_CUT = _of(chunks_of([_CALL[:60], _CALL[60:82]], finish=_LENGTH, has_ends=True), model=HERMES)  # before arguments
_THINKING = _of(chunks_of(["Hm", ".\n</th", "ink>\n\n", "Yes", "."]), model=HERMES, in_reasoning=True)
_LOST = Scripted(chunks=chunks_of(PIECES, finish=None)[:4], error=quire.UnavailableError("the server stayed away"))
_EXPIRED = Scripted(chunks=chunks_of(PIECES, finish=None)[:4], state=quire.RequestState.EXPIRED)
_CANCELLED = Scripted(chunks=chunks_of(PIECES, finish=None)[:4], state=quire.RequestState.CANCELLED)
_ATTACHED = Scripted(chunks=_SEVERAL.chunks, is_attached=True)
_LOGPROBS = ["message.output_text.logprobs"]

RECORDED: Mapping[str, Recorded] = {
    "completion": _completion(_PLAIN),
    "completion-several": _completion(_SEVERAL),
    "completion-usage": _completion(_PLAIN, stream_options={"include_usage": True}),
    "completion-counting": _completion(
        _SEVERAL, stream_options={"include_usage": True, "continuous_usage_stats": True}
    ),
    "completion-logprobs": _completion(_PROBABLE, logprobs=2),
    "completion-echo": _completion(_PROBABLE, logprobs=1, echo=True),
    "completion-echo-text": _completion(_PLAIN, echo=True),
    "completion-two": _completion(_TWO, n=2),
    "completion-ids": _completion(_of(chunks_of(PIECES, has_ids=True)), return_token_ids=True),
    "completion-keyed": _completion(_TWO_ENDS, _KEY, n=2),
    "completion-resumed": _completion(_ATTACHED, {**_KEY, "last-event-id": "3"}),
    "completion-lost": _completion(_LOST),
    "completion-expired": _completion(_EXPIRED),
    "completion-old": Recorded(path="/v1/completions", body=_COMPLETION, script=_PLAIN, version="1.0"),
    "chat": _chat(_PLAIN),
    "chat-usage": _chat(_SEVERAL, stream_options={"include_usage": True}),
    "chat-logprobs": _chat(_PROBABLE, logprobs=True, top_logprobs=2),
    "chat-two": _chat(_TWO, n=2),
    "chat-ids": _chat(_of(chunks_of(PIECES, has_ids=True)), return_token_ids=True),
    "chat-calls": _chat(_CALLING, tools=[_TOOL]),
    "chat-calls-at-once": _chat(_CALLING_AT_ONCE, tools=[_TOOL]),
    "chat-keyed-call-cut": _chat(_CALL_CUT, _KEY, tools=[_TOOL]),
    "chat-thinking": _chat(_THINKING),
    "chat-keyed": _chat(_SEVERAL, _KEY),
    "chat-keyed-calls": _chat(_CALLING_ENDS, _KEY, tools=[_TOOL], parallel_tool_calls=False),
    "chat-resumed": _chat(_ATTACHED, {**_KEY, "last-event-id": "4"}),
    "chat-lost": _chat(_LOST),
    "response": _response(_of(chunks_of(PIECES, has_ends=True))),
    "response-several": _response(_SEVERAL),
    "response-logprobs": _response(_PROBABLE, include=_LOGPROBS, top_logprobs=2),
    "response-calls": _response(_CALLING_ENDS, tools=[_FLAT]),
    "response-thinking": _response(_THINKING),
    "response-background": _response(_SEVERAL, background=True),
    "response-resumed": _response(_ATTACHED, {**_KEY, "last-event-id": "6"}),
    "response-lost": _response(_LOST),
    "response-expired": _response(_EXPIRED),
    "response-cancelled": _response(_CANCELLED),
    "message": _message(_PLAIN),
    "message-several": _message(_SEVERAL),
    "message-stopped": _message(_of(chunks_of(PIECES, finish=_STOPPED)), stop_sequences=["END"]),
    "message-calls": _message(_CALLING, tools=[_USED]),
    "message-thinking": _message(_THINKING),
    "message-lost": _message(_LOST),
    "message-cancelled": _message(_CANCELLED),
}


def main() -> None:
    """Record all."""
    for name, recorded in RECORDED.items():
        (FOLDER / f"{name}.http").write_bytes(asyncio.run(recorded.answer()))


if __name__ == "__main__":
    main()
