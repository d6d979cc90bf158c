"""`quire serve` on the GPU, as a user starts it: what it streams is what the CPU answers."""

import asyncio
import signal
from collections.abc import Iterator

import pytest

import quire
from tests.equality import assert_equal_greedy
from tests.on_gpu.gpu_workers import DEVICE
from tests.quire.serve_lines import Serve
from tests.services import DEMO_MODEL
from tests.worker.tiny_models import GreedyReference, random_prompts, reference_greedy

NUM_TOKENS = 64
PROMPTS = random_prompts((3, 16, 40, 100), seed=2)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ("--device", DEVICE, "--dtype", "float32", "--gateways", "0")
    serve = Serve(tmp_path_factory.mktemp("serve") / "data", *flags)
    try:
        yield serve.wait_ready()
    finally:
        assert serve.end(signal.SIGTERM) == 0


@pytest.fixture(scope="module")
def reference() -> GreedyReference:
    return reference_greedy(DEMO_MODEL, PROMPTS, NUM_TOKENS)


async def streamed(client: quire.AsyncClient, prompt: list[int]) -> tuple[list[int], str, quire.Completion]:
    """Tokens and text as they came, and the whole at the end."""
    tokens: list[int] = []
    text = ""
    async with client.stream(prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True) as stream:
        async for chunk in stream:
            tokens += chunk.token_ids
            text += chunk.text
        return tokens, text, await stream.completion()


async def test_streams_side_by_side_are_what_the_cpu_answers(address: str, reference: GreedyReference) -> None:
    async with quire.AsyncClient(address) as client:
        await client.wait_ready(60)
        outputs = await asyncio.gather(*(streamed(client, prompt) for prompt in PROMPTS))
    assert_equal_greedy(reference.tokens, reference.margins, [tokens for tokens, _, _ in outputs])
    for tokens, text, completion in outputs:
        assert (tokens, text) == (list(completion.token_ids), completion.text)
