"""Tokenisation of prompts off the event loop: one after another, long ones in another thread than short ones.

In each thread tenants take turns, so that one with many prompts keeps no other waiting. What waits is bounded in bytes.
Texts and token ids of Tokenize and Detokenize have threads of their own. Knows the forms of a prompt; its contents were
checked before.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar, TypeVarTuple

from common.violations import refusal_of
from quire.errors import OverloadedError
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.params.chat_prompt import encode_chat
from scheduler_svc.requests.params.served_model import ServedModel
from scheduler_svc.text.shared_thread import SharedThread
from scheduler_svc.text.tokenizer import ModelTokenizer

Prompt = str | pb.ChatPrompt | Sequence[int]
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

MOST_WAITING = 256 << 20  # characters of texts, bytes of chats and token ids
_LONG = 16_384  # of the same
_RETRY_S = 1.0


class _Threads:
    """Threads of texts and token ids, and of chats. More would take the interpreter from the event loop."""

    def __init__(self, name: str) -> None:
        self._short = SharedThread(name)
        self._long = SharedThread(f"long-{name}")  # so that no short text waits behind a long one
        # Chats have threads of their own: their template is a program of the model, and may be slow.
        self._chat = SharedThread(f"chat-{name}")
        self._long_chat = SharedThread(f"long-chat-{name}")

        self._waiting = Counter[str]()  # lengths of all together, by owner

    async def run_text(self, owner: str, length: int, work: Callable[[*Arguments], T], *args: *Arguments) -> T:
        """Have work on a text, or on so many token ids, done. Raises OverloadedError."""
        return await self._run(self._long if length > _LONG else self._short, owner, length, work, *args)

    async def run_chat(self, owner: str, chat: pb.ChatPrompt, work: Callable[[*Arguments], T], *args: *Arguments) -> T:
        """Have work on a chat done. Raises OverloadedError."""
        length = chat.ByteSize()
        return await self._run(self._long_chat if length > _LONG else self._chat, owner, length, work, *args)

    async def _run(
        self, thread: SharedThread, owner: str, length: int, work: Callable[[*Arguments], T], *args: *Arguments
    ) -> T:
        mine, waiting = self._waiting[owner], self._waiting.total()
        if waiting + length > MOST_WAITING or (mine and mine + length > MOST_WAITING // 2):
            raise OverloadedError(f"{waiting >> 20} MiB of prompts wait to be tokenised; come back later", _RETRY_S)
        self._waiting[owner] += length
        try:
            return await thread.run(owner, work, *args)
        finally:
            self._waiting[owner] -= length
            if not self._waiting[owner]:
                del self._waiting[owner]


class PromptTokenizer:
    """One per process. Used only while the served model has a tokenizer."""

    def __init__(self) -> None:
        self._prompts = _Threads("tokenizer")
        self._lookups = _Threads("lookup")  # so that no request waits behind them

    async def token_ids(self, prompt: Prompt, model: ServedModel, tenant: str = "") -> list[int]:
        """Token ids of a prompt: text with special tokens, a chat by its template, token ids as they are.

        Raises InvalidRequestError for a token that the tokenizer has and the model has not, OverloadedError.
        """
        if not isinstance(prompt, str | pb.ChatPrompt):
            return list(prompt)
        tokenizer = model.tokenizer
        assert tokenizer is not None, "text and chats are refused without a tokenizer"
        if isinstance(prompt, str):
            token_ids = await self._prompts.run_text(tenant, len(prompt), tokenizer.encode, prompt, True)
        else:
            token_ids = await self._prompts.run_chat(tenant, prompt, encode_chat, tokenizer, prompt)
        largest, vocab_size = max(token_ids, default=0), model.limits.vocab_size
        if largest >= vocab_size:
            raise refusal_of(
                "prompt",
                f"has a token of the tokenizer that the model does not have, {largest}; its ids end at "
                f"{vocab_size - 1}: leave that token out",
            )
        return token_ids

    async def tokenized(self, request: pb.TokenizeRequest, tokenizer: ModelTokenizer) -> pb.TokenizeResponse:
        """Answer of Tokenize. Raises OverloadedError."""
        if request.HasField("chat"):
            return await self._lookups.run_chat("", request.chat, _tokenized_chat, request.chat, tokenizer)
        return await self._lookups.run_text("", len(request.text), _tokenized_text, request, tokenizer)

    async def detokenized(self, request: pb.DetokenizeRequest, tokenizer: ModelTokenizer) -> pb.DetokenizeResponse:
        """Answer of Detokenize. Raises OverloadedError."""
        return await self._lookups.run_text("", len(request.token_ids), _detokenized, request, tokenizer)


def _tokenized_chat(chat: pb.ChatPrompt, tokenizer: ModelTokenizer) -> pb.TokenizeResponse:
    return _with_tokens(encode_chat(tokenizer, chat), tokenizer)


def _tokenized_text(request: pb.TokenizeRequest, tokenizer: ModelTokenizer) -> pb.TokenizeResponse:
    special = request.add_special_tokens if request.HasField("add_special_tokens") else True
    return _with_tokens(tokenizer.encode(request.text, special), tokenizer)


def _with_tokens(token_ids: list[int], tokenizer: ModelTokenizer) -> pb.TokenizeResponse:
    return pb.TokenizeResponse(token_ids=token_ids, tokens=tokenizer.tokens(token_ids))


def _detokenized(request: pb.DetokenizeRequest, tokenizer: ModelTokenizer) -> pb.DetokenizeResponse:
    token_ids = list(request.token_ids)
    return pb.DetokenizeResponse(
        text=tokenizer.decode(token_ids, request.keep_special_tokens),
        pieces=tokenizer.pieces(token_ids) if request.pieces else (),
    )


def prompt_of(request: pb.GenerateRequest) -> Prompt:
    """Prompt of a request that has been checked."""
    kind = request.WhichOneof("prompt")
    return request.text if kind == "text" else request.chat if kind == "chat" else request.token_ids.ids


def prefix_of(request: pb.PinPrefixRequest) -> Prompt:
    """Prefix to be pinned, which has been checked. A chat gets no generation prompt unless it asks for one."""
    kind = request.WhichOneof("prefix")
    if kind != "chat":
        return request.text if kind == "text" else request.token_ids.ids
    chat = pb.ChatPrompt()
    chat.CopyFrom(request.chat)
    chat.add_generation_prompt = request.chat.add_generation_prompt
    return chat
