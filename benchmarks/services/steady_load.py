"""A number of requests that decode side by side, long enough to measure steps with all of them in it.

Knows an address, not what serves there.
"""

import asyncio
import random
import time
from collections.abc import Callable

from quire import AsyncClient

MAX_TOKENS = 8000  # more than any request comes to
RETRIES = 100  # on a busy machine a store may be late, and the scheduler refuses meanwhile


async def run_steadily(
    address: str, num_requests: int, prompt_tokens: int, num_tokens: int, vocab_size: int, on_read: "OnRead"
) -> None:
    """Run requests until each has generated `num_tokens` after the last one began; then cancel them."""
    async with AsyncClient(address, retries=RETRIES) as client:
        await client.wait_ready(10.0)
        readers = _Readers(client, num_requests, num_tokens, on_read)
        async with asyncio.TaskGroup() as tasks:
            for prompt in prompts(num_requests, prompt_tokens, vocab_size):
                tasks.create_task(readers.read(prompt))


OnRead = Callable[[int], None]  # told, on the clock of the traces, when a reader has a chunk


class _Readers:
    def __init__(self, client: AsyncClient, num_readers: int, num_tokens: int, on_read: OnRead) -> None:
        self._client = client
        self._num_waiting = num_readers  # for their first token
        self._num_tokens = num_tokens
        self._on_read = on_read

    async def read(self, prompt: list[int]) -> None:
        num_left = self._num_tokens
        has_begun = False
        async with self._client.stream(prompt, max_tokens=MAX_TOKENS, ignore_eos=True) as stream:
            async for chunk in stream:
                self._on_read(time.perf_counter_ns())
                if not has_begun:
                    has_begun = True
                    self._num_waiting -= 1
                if not self._num_waiting:
                    num_left -= chunk.num_tokens
                if num_left <= 0:
                    return
        raise RuntimeError("a request ended before enough steps were measured")


def prompts(num_requests: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    """Random prompts without a shared prefix, always the same."""
    generator = random.Random(num_requests)
    return [[generator.randrange(3, vocab_size) for _ in range(num_tokens)] for _ in range(num_requests)]
