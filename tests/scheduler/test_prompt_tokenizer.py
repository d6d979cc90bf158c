"""Prompts of many tenants at one tokenizer, and the turns that they take."""

import asyncio
import threading
from types import SimpleNamespace
from typing import cast

import pytest

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
