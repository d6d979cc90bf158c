"""Prompts to token ids, off the event loop: one prompt after another, and long ones apart from short ones.

It knows which forms a prompt can have; what may be asked was checked before.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.served_model import ServedModel, encode_chat

Prompt = str | pb.ChatPrompt | Sequence[int]

_LONG = 16_384  # characters of a text, or bytes of a chat


class PromptTokenizer:
    """One per process. It is at work only while a model is served that has a tokenizer."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self._long_thread = ThreadPoolExecutor(1, "long-tokenizer")  # so that nobody waits behind a whole book
        # Chats have threads of their own: their template is a program of the model's, and may take its time.
        self._chat_thread = ThreadPoolExecutor(1, "chat")
        self._long_chat_thread = ThreadPoolExecutor(1, "long-chat")

    async def token_ids(self, prompt: Prompt, model: ServedModel) -> list[int]:
        """Text with the model's special tokens added, a chat by its template, token ids as they are."""
        if not isinstance(prompt, str | pb.ChatPrompt):
            return list(prompt)
        tokenizer = model.tokenizer
        assert tokenizer is not None, "text and chats are refused without a tokenizer"
        loop = asyncio.get_running_loop()
        if isinstance(prompt, str):
            thread = self._long_thread if len(prompt) > _LONG else self._thread
            return await loop.run_in_executor(thread, tokenizer.encode, prompt, True)
        thread = self._long_chat_thread if prompt.ByteSize() > _LONG else self._chat_thread
        return await loop.run_in_executor(thread, encode_chat, tokenizer, prompt)


def prompt_of(request: pb.GenerateRequest) -> Prompt:
    """What a request is to go on from; it has been checked."""
    kind = request.WhichOneof("prompt")
    return request.text if kind == "text" else request.chat if kind == "chat" else request.token_ids.ids


def prefix_of(request: pb.PinPrefixRequest) -> Prompt:
    """What is to be pinned; it has been checked. A chat opens no answer unless it says so."""
    kind = request.WhichOneof("prefix")
    if kind != "chat":
        return request.text if kind == "text" else request.token_ids.ids
    chat = pb.ChatPrompt()
    chat.CopyFrom(request.chat)
    chat.add_generation_prompt = request.chat.add_generation_prompt
    return chat
