"""Tokenize and Detokenize beside others: long ones make neither short ones nor requests wait."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from quire.v1 import inference_pb2 as pb
from scheduler_svc.text.tokenizer import ModelTokenizer
from tests.patience import patient
from tests.scheduler.journal_setup import until
from tests.scheduler.serving_site import Site, running_site
from tests.scheduler.text_tokenizers import SPECIAL_TOKENS, byte_level_json

NUM_LONG = 32
LONG = 60_000
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class GatedTokenizer(ModelTokenizer):
    """Tokenizer in which long inputs wait until the test releases them."""

    def __init__(self) -> None:
        super().__init__(byte_level_json(), TEMPLATE, SPECIAL_TOKENS)
        self.may_go_on = threading.Event()
        self.num_at_work = 0

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self._pass(len(text))
        return super().encode(text[:10], add_special_tokens)

    def encode_chat(self, messages: Sequence[Any], add_generation_prompt: bool) -> list[int]:
        self._pass(sum(len(each["content"]) for each in messages))
        return [1]

    def decode(self, token_ids: Sequence[int], keep_special_tokens: bool) -> str:
        self._pass(len(token_ids))
        return super().decode(token_ids[:10], keep_special_tokens)

    def _pass(self, length: int) -> None:
        if length >= LONG:
            self.num_at_work += 1
            self.may_go_on.wait()


@pytest.fixture
def tokenizer() -> Iterator[GatedTokenizer]:
    made = GatedTokenizer()
    yield made
    made.may_go_on.set()


def chat_of(length: int) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x" * length)])


def lookup(site: Site, kind: str, length: int) -> Any:
    if kind == "ids":
        return site.inference.Detokenize(pb.DetokenizeRequest(token_ids=[40] * length))
    prompt: dict[str, Any] = {"text": "x" * length} if kind == "text" else {"chat": chat_of(length)}
    return site.inference.Tokenize(pb.TokenizeRequest(**prompt))


@pytest.mark.parametrize("kind", ["text", "chat", "ids"])
async def test_long_lookups_are_done_one_by_one_and_short_ones_and_prompts_pass_them(
    tokenizer: GatedTokenizer, kind: str
) -> None:
    """300 of one client, six at a time, made others wait 17 s for output, and 26 s for a Tokenize of two letters."""
    async with running_site() as site:
        await site.add_worker()
        model = site.admission.model
        assert model is not None
        limits = replace(model.limits, has_tokenizer=True, has_chat_template=True, longest_token_chars=16)
        site.admission.model = replace(model, tokenizer=tokenizer, limits=limits)
        many = [asyncio.create_task(_await(lookup(site, kind, LONG))) for _ in range(NUM_LONG)]
        await until(lambda: tokenizer.num_at_work > 0)
        async with asyncio.timeout(patient(20)):
            await lookup(site, kind, 3)
            await site.run(pb.GenerateRequest(text="x", stopping=pb.StoppingParams(max_tokens=1)))
            await site.run(pb.GenerateRequest(chat=chat_of(3), stopping=pb.StoppingParams(max_tokens=1)))
        assert tokenizer.num_at_work == 1
        tokenizer.may_go_on.set()
        await asyncio.gather(*many)
        assert tokenizer.num_at_work == NUM_LONG


async def _await(call: Any) -> Any:
    return await call
