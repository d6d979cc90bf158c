"""Answers in 16 bits, and with KV in 8, have only rounding errors: the chosen tokens are as good as the best.

Each token of ours is judged by float32 logits of `transformers` behind our own tokens before it, so a near tie that
falls the other way ends no comparison.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import quire
from demo.stories import documents
from tests.kernels.on_device.devices import HAS_E4M3
from tests.on_gpu.gpu_workers import DEVICE, Served, Variant, all_serving
from tests.services import DEMO_MODEL

NUM_TOKENS = 64
NUM_PROMPTS = 8
POOL = ("--num-blocks", "200")
# Of the chosen tokens: how far the worst may lie below the best logit, and how many must be the best. Without a GPU
# these come to 0.06 and 99.6 % in bfloat16, 0 and 100 % in float16, 0.04 and 99.2 % with KV in fp8.
MAX_GAP = {"bfloat16": 0.5, "float16": 0.1, "bfloat16, fp8 KV": 0.75}
MIN_BEST = {"bfloat16": 0.97, "float16": 0.99, "bfloat16, fp8 KV": 0.95}
FLAGS: dict[str, tuple[str, ...]] = {
    "bfloat16": ("--dtype", "bfloat16"),
    "float16": ("--dtype", "float16"),
}
if HAS_E4M3:
    FLAGS["bfloat16, fp8 KV"] = ("--dtype", "bfloat16", "--kv-dtype", "fp8")


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, Served]]:
    variants = {name: Variant(model=DEMO_MODEL, worker_flags=(*flags, *POOL)) for name, flags in FLAGS.items()}
    with all_serving(variants) as served:
        yield served


@pytest.fixture(scope="module")
def reference() -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)


@pytest.mark.parametrize("name", FLAGS)
def test_what_is_chosen_in_few_bits_is_as_good_as_the_best(
    name: str, served: dict[str, Served], reference: Any
) -> None:
    address = served[name].ready_address()
    stories = documents(1_000_000)
    texts = [next(stories)[: 40 + 60 * index] for index in range(NUM_PROMPTS)]
    completions = asyncio.run(generate_all(address, texts))
    gaps = torch.cat([gaps_to_best(reference, prompt, tokens) for prompt, tokens in completions])
    is_best = (gaps == 0).float().mean().item()
    print(  # noqa: T201 - kept in the log of gpu_check
        f"{name} on {DEVICE}: {len(gaps)} tokens, {is_best:.4f} the best, worst gap {gaps.max().item():.3f}"
    )
    assert gaps.max().item() <= MAX_GAP[name]
    assert is_best >= MIN_BEST[name]


@torch.inference_mode()
def gaps_to_best(model: Any, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """Gap of each output token: the best logit after the tokens before it, less the token's own."""
    logits = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    gaps: torch.Tensor = logits.max(dim=1).values - chosen
    return gaps


async def generate_all(address: str, texts: list[str]) -> list[tuple[list[int], list[int]]]:
    """Prompt and output of each, in tokens."""
    async with quire.AsyncClient(address) as client:
        await client.wait_ready(60)
        prompts = [list((await client.tokenize(text)).token_ids) for text in texts]
        completions = await asyncio.gather(
            *(client.generate(prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True) for prompt in prompts)
        )
    return [(prompt, list(each.token_ids)) for prompt, each in zip(prompts, completions, strict=True)]
