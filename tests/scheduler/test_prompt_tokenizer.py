"""Prompts of many tenants at one tokenizer, and the turns that they take."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from scheduler_svc.requests.params.prompt_tokenizer import PromptTokenizer
from scheduler_svc.requests.params.served_model import ServedModel
from scheduler_svc.text.owner_turns import OwnerTurns


@pytest.mark.parametrize("length", [10, 20_000])
async def test_a_tenant_with_many_prompts_keeps_no_other_waiting(length: int) -> None:
    """Regression: 900 long texts of one kept the long texts of all others waiting for as long as they took."""
    told: list[str] = []

    def encode(text: str, special: bool) -> list[int]:
        told.append(text.rstrip())
        return [1]

    model = SimpleNamespace(tokenizer=SimpleNamespace(encode=encode), limits=SimpleNamespace(vocab_size=2))
    tokenizer = PromptTokenizer()
    tenants = ["greedy"] * 20 + ["first", "second"]
    prompts = [(f"{tenant} {number}".ljust(length), tenant) for number, tenant in enumerate(tenants)]
    asked = (tokenizer.token_ids(prompt, cast(ServedModel, model), tenant) for prompt, tenant in prompts)
    assert await asyncio.gather(*asked) == [[1]] * 22
    assert told[:4] == ["greedy 0", "first 20", "second 21", "greedy 1"]
    assert told[4:] == [f"greedy {number}" for number in range(2, 20)]


async def test_nothing_is_kept_of_owners_whose_work_is_done_failed_or_given_up() -> None:
    turns = OwnerTurns()

    async def work(owner: str, *, fails: bool = False) -> None:
        async with turns.turn(owner):
            await asyncio.sleep(0)
            assert not fails

    given_up = [asyncio.create_task(work("given up")) for _ in range(3)]
    await asyncio.sleep(0)
    for each in given_up:
        each.cancel()
    failing = [work("failing", fails=True) for _ in range(3)]
    await asyncio.gather(*given_up, *failing, work("done"), return_exceptions=True)
    assert not turns._turns and not turns._num_works
