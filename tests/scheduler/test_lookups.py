"""Tokenize, Detokenize and prompts beside others: one at a time of a kind, and long ones make no short ones wait."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
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
    """Tokenizer in which inputs of some lengths, at first long ones, wait until the test releases them."""

    def __init__(self) -> None:
        super().__init__(byte_level_json(), TEMPLATE, SPECIAL_TOKENS)
        self.may_go_on = threading.Event()
        self.gated_lengths = range(LONG, 2 * LONG)
        self.num_at_work = 0

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self._pass(len(text))
        return super().encode(text[:10], add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Any],
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        **variables: str,
    ) -> list[int]:
        self._pass(sum(len(each["content"]) for each in messages))
        return [1]

    def decode(self, token_ids: Sequence[int], keep_special_tokens: bool) -> str:
        self._pass(len(token_ids))
        return super().decode(token_ids[:10], keep_special_tokens)

    def _pass(self, length: int) -> None:
        if length in self.gated_lengths:
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


def prompt(site: Site, kind: str, length: int) -> Any:
    prompts: dict[str, Any] = {"text": "x" * length} if kind == "text" else {"chat": chat_of(length)}
    return site.run(pb.GenerateRequest(**prompts, stopping=pb.StoppingParams(max_tokens=1)))


@asynccontextmanager
async def site_of(tokenizer: GatedTokenizer) -> AsyncIterator[Site]:
    async with running_site() as site:
        await site.add_worker()
        model = site.admission.model
        assert model is not None
        limits = replace(model.limits, has_tokenizer=True, has_chat_template=True, longest_token_chars=16)
        site.admission.model = replace(model, tokenizer=tokenizer, limits=limits)
        yield site


@pytest.mark.parametrize("kind", ["text", "chat", "ids"])
async def test_long_lookups_are_done_one_by_one_and_short_ones_and_prompts_pass_them(
    tokenizer: GatedTokenizer, kind: str
) -> None:
    """300 of one client, six at a time, made others wait 17 s for output, and 26 s for a Tokenize of two letters."""
    async with site_of(tokenizer) as site:
        many = [asyncio.create_task(_await(lookup(site, kind, LONG))) for _ in range(NUM_LONG)]
        await until(lambda: tokenizer.num_at_work > 0)
        async with asyncio.timeout(patient(20)):
            await lookup(site, kind, 3)
            for each in ("text", "chat"):
                await prompt(site, each, 3)
                await prompt(site, each, LONG - 1)
        assert tokenizer.num_at_work == 1
        tokenizer.may_go_on.set()
        await asyncio.gather(*many)
        assert tokenizer.num_at_work == NUM_LONG


@pytest.mark.parametrize("kind", ["text", "chat"])
async def test_long_prompts_are_tokenised_one_by_one_and_all_else_passes_them(
    tokenizer: GatedTokenizer, kind: str
) -> None:
    async with site_of(tokenizer) as site:
        many = [asyncio.create_task(prompt(site, kind, LONG)) for _ in range(4)]
        await until(lambda: tokenizer.num_at_work > 0)
        async with asyncio.timeout(patient(20)):
            for each in ("text", "chat"):
                await prompt(site, each, 3)
                await lookup(site, each, LONG - 1)
        assert tokenizer.num_at_work == 1
        tokenizer.may_go_on.set()
        await asyncio.gather(*many)
        assert tokenizer.num_at_work == 4


@pytest.mark.parametrize(("call", "kind"), [(lookup, "text"), (lookup, "chat"), (prompt, "text"), (prompt, "chat")])
async def test_short_ones_too_are_done_one_by_one(tokenizer: GatedTokenizer, call: Any, kind: str) -> None:
    """Several threads would take the interpreter from the event loop, by which everybody's output goes."""
    tokenizer.gated_lengths = range(5, 6)
    async with site_of(tokenizer) as site:
        some = [asyncio.create_task(_await(call(site, kind, 5))) for _ in range(4)]
        await until(lambda: tokenizer.num_at_work > 0)
        async with asyncio.timeout(patient(20)):
            await call(site, kind, LONG - 1)  # longer ones do not wait for these either
        assert tokenizer.num_at_work == 1
        tokenizer.may_go_on.set()
        await asyncio.gather(*some)
        assert tokenizer.num_at_work == 4


async def _await(call: Any) -> Any:
    return await call
