"""Pins on real services with the demo model: they outlive pressure and the death of a worker, and change no output."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

import quire
from tests.e2e.test_shutdown import serving
from tests.equality import assert_equal_greedy
from tests.patience import patient
from tests.scheduler.journal_setup import until
from tests.services import Service, free_address, start_scheduler, start_worker

NUM_BLOCKS = 40
PRESSURE_TOKENS = 35 * 16  # of a prompt that takes, with its output, 37 blocks: all but what is pinned
TAILS = ("Tom had a red ball. ", "Lily saw a small bird. ", "They went to the river. ")


class Site:
    """A scheduler, its worker of NUM_BLOCKS blocks, a client."""

    def __init__(self, stack: ExitStack) -> None:
        self.scheduler, self.address = start_scheduler(listen=free_address())
        stack.enter_context(self.scheduler)
        self._stack = stack
        self.worker = self.start_worker()
        self.client = stack.enter_context(quire.Client(self.address))
        self.client.wait_ready(60)

    def start_worker(self) -> Service:
        options = ("--worker-id", "only", "--dtype", "float32", "--threads", "1", "--num-blocks", str(NUM_BLOCKS))
        return self._stack.enter_context(start_worker(self.address, *options))

    def tokens(self, text: str) -> list[int]:
        return list(self.client.tokenize(text, add_special_tokens=False).token_ids)

    def run(self, prompt: Sequence[int], tenant: str) -> quire.Completion:
        return self.client.generate(prompt, max_tokens=24, temperature=0, ignore_eos=True, tenant=tenant, logprobs=2)

    def cached_tokens(self, prompt: Sequence[int], tenant: str) -> int:
        return self.run(prompt, tenant).usage.cached_tokens

    def press(self, seed: int) -> None:
        """Compute two prompts without a shared prefix: the second takes the memory that the first has left."""
        for tenant in ("stranger", "other stranger"):
            self.run([5 + (seed * 977 + i * 31) % 1000 for i in range(PRESSURE_TOKENS)], tenant)

    def memory(self) -> tuple[int, int]:
        """Blocks pinned, and blocks in use."""
        blocks = self.client.stats().workers[0].blocks
        return blocks.pinned, blocks.used


@pytest.fixture
def site() -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(stack)


def test_a_pin_outlives_pressure_and_the_death_of_the_worker_and_changes_no_output(site: Site) -> None:
    rules = site.tokens("Once upon a time there was a brave girl who lived in a green house. " * 4)[:60]
    other = site.tokens("One day a small dog found a big bone in the garden and was very happy. " * 4)[:60]
    prompts = [rules + site.tokens(tail) for tail in TAILS]
    unpinned = [site.run(prompt, "acme") for prompt in prompts]
    site.press(1)
    assert site.cached_tokens(prompts[0], "acme") == 0  # not pinned, it was evicted

    pinned = site.client.pin_prefix("rules", rules, tenant="acme")
    assert (pinned.created, pinned.num_tokens, pinned.num_blocks, pinned.worker_ids) == (True, 48, 3, ("only",))
    assert site.memory() == (3, 3)
    site.cached_tokens(other, "acme")
    assert site.cached_tokens(other, "acme") == 48
    site.press(2)
    assert site.cached_tokens(other, "acme") == 0
    completions = [site.run(prompt, "acme") for prompt in prompts]
    assert [each.usage.cached_tokens for each in completions] == [48] * 3
    assert site.cached_tokens(prompts[0], "another tenant") == 0
    assert_same(unpinned, completions)

    site.worker.kill()
    site.scheduler.wait_for("worker lost")
    assert site.client.list_prefixes(tenant="acme")[0].worker_ids == ()
    num_pinned = sum(line.get("event") == "prefix pinned" for line in site.scheduler.lines)
    site.start_worker()
    site.scheduler.wait_for("prefix pinned", num_pinned + 1)  # and no client has asked for anything
    assert site.client.list_prefixes(tenant="acme")[0].worker_ids == ("only",)
    completions = [site.run(prompt, "acme") for prompt in prompts]
    assert [each.usage.cached_tokens for each in completions] == [48] * 3
    assert_same(unpinned, completions)

    site.client.unpin_prefix("rules", tenant="acme")
    assert site.client.list_prefixes(tenant="acme") == ()
    site.press(3)
    assert site.cached_tokens(prompts[0], "acme") == 0
    assert site.memory()[0] == 0
    assert site.scheduler.stop() == 0
    assert "Traceback" not in "".join(site.scheduler.raw)


def assert_same(expected: Sequence[quire.Completion], completions: Sequence[quire.Completion]) -> None:
    """Equal tokens, as far as the best was clearly better than the second."""
    margins = [[each.top[0][1] - each.top[1][1] for each in completion.logprobs] for completion in expected]
    assert_equal_greedy([each.token_ids for each in expected], margins, [each.token_ids for each in completions])


async def test_the_end_of_the_scheduler_waits_for_no_prefix() -> None:
    async with serving("--drain-timeout-s", "600") as (service, worker, client):
        await client.wait_ready(60)
        worker.may_answer.clear()
        asking = asyncio.create_task(client.pin_prefix("slow", range(64)))
        await until(lambda: bool(worker.steps))
        began_s = time.monotonic()
        assert await asyncio.to_thread(service.stop) == 0
        assert time.monotonic() - began_s < patient(30)
        with pytest.raises(quire.UnavailableError):
            await asking
