"""A client of the SDK whose requests have a scripted output, for gateways within the test's process."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import quire
from quire.answer_reader import AnswerReader
from quire.open_request import OpenRequest
from quire.results import Accepted, Chunk, Finish, Outcome, RequestMemory, RequestState, Timings, Usage
from quire.stream import CompletionStream

BEGAN_S = 1_700_000_000.0
STOP = Finish(quire.FinishReason.STOP)


@dataclass(frozen=True, kw_only=True)
class Scripted:
    """The output of each request, and its end."""

    chunks: Sequence[Chunk]
    state: RequestState = RequestState.FINISHED
    error: quire.QuireError | None = None  # in place of the end
    is_attached: bool = False
    in_reasoning: bool = False
    model: dict[str, Any] = field(default_factory=dict)  # fields that differ


class ScriptedSession:
    """The place of requests that are only here. Keeps what was asked of it, in words."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def cancel(self, request: OpenRequest) -> None:
        self.asked.append("cancel")
        request.fail(quire.RequestCancelledError("cancelled by its reader"))

    def detach(self, request: OpenRequest) -> None:
        self.asked.append("detach")
        request.fail(quire.RequestCancelledError("the reader was closed"))

    def catch_up(self, request: OpenRequest) -> None:
        self.asked.append("catch up")


class ScriptedClient(quire.AsyncClient):
    """Plays the script for each request, a chunk in each turn of the event loop."""

    def __init__(self, script: Scripted) -> None:
        super().__init__("127.0.0.1:1")
        self.script = script
        self.session = ScriptedSession()
        self.requests: list[OpenRequest] = []

    async def model(self) -> quire.Model:
        fixed: dict[str, Any] = {
            "name": "scripted", "fingerprint": "f", "architecture": "llama", "dtype": "float32",
            "max_model_len": 1024, "vocab_size": 100, "eos_token_ids": (0,), "has_tokenizer": True,
            "has_chat_template": True,
        }  # fmt: skip
        return quire.Model(**fixed | self.script.model)

    async def token_pieces(self, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        return tuple(b"\xc3" if each % 7 == 0 else f" t{each}".encode() for each in token_ids)

    async def tokenize(self, text: Any, **_: Any) -> quire.Tokens:
        return quire.Tokens((3, 4, 5), (" t3", " t4", " t5"))

    def new_request_id(self, *_: Any, prefix: str = "", **__: Any) -> str:
        return f"{prefix}scripted"

    def stream(self, prompt: Any, **params: Any) -> CompletionStream:
        return self.play(params["request_id"])

    def stream_chat(self, messages: Any, **params: Any) -> CompletionStream:
        format = params.get("answer_format")
        return self.play(params["request_id"], None if format is None else AnswerReader(format))

    def play(self, request_id: str, answers: AnswerReader | None = None) -> CompletionStream:
        """The stream of a request that was submitted just now."""
        request = OpenRequest(request_id, from_positions=(), buffer_tokens=4096)
        self.requests.append(request)
        asyncio.get_running_loop().call_soon(self._accept, request)
        return CompletionStream(self.session, request, cancels_on_close=True, answers=answers)

    def _accept(self, request: OpenRequest) -> None:
        script = self.script
        request.record_acceptance(
            Accepted(request.request_id, 5, 100, 1, script.is_attached, 1, script.in_reasoning, BEGAN_S)
        )
        asyncio.get_running_loop().call_soon(self._go_on, request, 0)

    def _go_on(self, request: OpenRequest, number: int) -> None:
        script = self.script
        if number < len(script.chunks):
            request.push_chunk(script.chunks[number])
            asyncio.get_running_loop().call_soon(self._go_on, request, number + 1)
        elif script.error is not None:
            request.fail(script.error)
        else:
            request.record_outcome(outcome(script.chunks, script.state))


def outcome(chunks: Sequence[Chunk], state: RequestState = RequestState.FINISHED) -> Outcome:
    """The end of a request with this output."""
    usage = Usage(prompt_tokens=5, completion_tokens=sum(each.num_tokens for each in chunks), cached_tokens=2)
    timings = Timings(accepted_s=0.001, first_scheduled_s=0.002, first_token_s=0.003, finished_s=1.5)
    return Outcome(state=state, usage=usage, timings=timings, memory=RequestMemory(), error="")


def chunks_of(
    pieces: Sequence[str],
    *,
    sizes: Sequence[int] = (),
    index: int = 0,
    finish: Finish | None = STOP,
    num_top: int | None = None,
    has_ids: bool = False,
    has_ends: bool = False,
) -> list[Chunk]:
    """The output of tokens with these texts.

    Args:
        pieces: texts of the tokens.
        sizes: tokens of the first chunks; each later one has one.
        index: of the sample.
        finish: with the last chunk; None: it has not ended.
        num_top: most likely tokens beside each; None: without log-probabilities.
        has_ids: with token ids.
        has_ends: with the ends of the tokens' texts.
    """
    chunks: list[Chunk] = []
    begin = 0
    while begin < len(pieces):
        size = sizes[len(chunks)] if len(chunks) < len(sizes) else 1
        texts = pieces[begin : begin + size]
        ids = [10 * (index + 1) + (begin + each) % 50 for each in range(len(texts))]
        begin += len(texts)
        ends = [sum(map(len, texts[: each + 1])) for each in range(len(texts))]
        logprobs = [
            quire.TokenLogprobs(each, -0.25 * number, 1, tuple((each + k, -0.5 * k) for k in range(num_top)))
            for number, each in enumerate(ids)
        ] if num_top is not None else []  # fmt: skip
        chunks.append(
            Chunk(
                index=index,
                position=begin - len(texts),
                num_tokens=len(texts),
                text="".join(texts),
                token_ids=tuple(ids) if has_ids else (),
                logprobs=tuple(logprobs),
                finish=finish if begin >= len(pieces) else None,
                text_ends=tuple(ends) if has_ends else (),
            )
        )
    return chunks
