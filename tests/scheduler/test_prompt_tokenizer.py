"""Prompts of many tenants at one tokenizer, and the turns that they take."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.errors import OverloadedError
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.params import prompt_tokenizer
from scheduler_svc.requests.params.prompt_tokenizer import PromptTokenizer
from scheduler_svc.requests.params.served_model import ServedModel


@pytest.mark.parametrize("length", [10, 20_000])
async def test_a_tenant_with_many_prompts_keeps_no_other_waiting(length: int) -> None:
    """Regression: 900 long texts of one kept the long texts of all others waiting for as long as they took."""
    told: list[str] = []
    are_all_there = threading.Event()

    def encode(text: str, special: bool) -> list[int]:
        are_all_there.wait()
        told.append(text.rstrip())
        return [1]

    model = SimpleNamespace(tokenizer=SimpleNamespace(encode=encode), limits=SimpleNamespace(vocab_size=2))
    tokenizer = PromptTokenizer()
    tenants = ["before", *["greedy"] * 20, "first", "second"]
    prompts = [(f"{tenant} {number}".ljust(length), tenant) for number, tenant in enumerate(tenants)]
    asked = (tokenizer.token_ids(prompt, cast(ServedModel, model), tenant) for prompt, tenant in prompts)
    answers = asyncio.gather(*asked)
    await asyncio.sleep(0)  # each has begun
    are_all_there.set()
    assert await answers == [[1]] * 23
    assert told[:5] == ["before 0", "greedy 1", "first 21", "second 22", "greedy 2"]
    assert told[5:] == [f"greedy {number}" for number in range(3, 21)]


async def test_texts_that_wait_are_bounded_in_length_together_and_of_each_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: they were bounded in number alone, which is gigabytes where each may have megabytes."""
    monkeypatch.setattr(prompt_tokenizer, "MOST_WAITING", 1000)
    may_go_on = threading.Event()

    def encode(text: str, special: bool) -> list[int]:
        may_go_on.wait()
        return [1]

    tokenizer: Any = SimpleNamespace(encode=encode, tokens=lambda ids: [b""] * len(ids), decode=lambda ids, keep: "")
    model = cast(ServedModel, SimpleNamespace(tokenizer=tokenizer, limits=SimpleNamespace(vocab_size=2)))
    prompts = PromptTokenizer()

    async def token_ids(length: int, tenant: str) -> list[int]:
        return await prompts.token_ids("x" * length, model, tenant)

    async with asyncio.TaskGroup() as waiting:
        first = waiting.create_task(token_ids(400, "a"))
        second = waiting.create_task(token_ids(550, "b"))  # alone of its tenant it may have more than half
        await asyncio.sleep(0)
        for length, tenant in ((101, "a"), (51, "c"), (1, "b")):
            with pytest.raises(OverloadedError, match="wait to be tokenised; come back later"):
                await token_ids(length, tenant)
        third = waiting.create_task(token_ids(50, "a"))
        lookup = waiting.create_task(prompts.tokenized(pb.TokenizeRequest(text="x" * 500), tokenizer))  # of its own
        await asyncio.sleep(0)
        may_go_on.set()
    assert first.result() == second.result() == third.result() == list(lookup.result().token_ids) == [1]
    assert await token_ids(1000, "a") == [1]
