"""Bits that flip between scheduler and worker (F20): the stream is given up, and no token is wrong."""

import asyncio
import random
from contextlib import suppress

import grpc
import pytest

from common.step_wire import RESPONSE_TAG
from tests.scheduler.journal_setup import until
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in

CHECKSUM_BYTES = 5  # a tag and a fixed32, at the end of each message
NUM_DAMAGED = 30
ONE_IN = 5  # messages


class FlippingWire:
    """Flips a bit of some messages, `NUM_DAMAGED` in all."""

    def __init__(self, seed: int) -> None:
        self.num_damaged = 0
        self._rng = random.Random(seed)

    def __call__(self, data: bytes) -> bytes:
        if self.num_damaged >= NUM_DAMAGED or self._rng.randrange(ONE_IN):
            return data
        self.num_damaged += 1
        bit = self._rng.randrange(8 * len(data))
        return (int.from_bytes(data, "big") ^ 1 << bit).to_bytes(len(data), "big")


async def keep_announcing(site: Site, worker: ScriptedWorker) -> None:
    """Announce it periodically, as workers do, so that a worker that was given up is driven again."""
    while True:
        with suppress(grpc.aio.AioRpcError):
            await site.cluster.Register(worker.registration())
        await asyncio.sleep(0.002)


async def test_flipped_bits_cost_no_request_and_no_token_is_wrong() -> None:
    async with running_site() as site:
        worker = await site.add_worker(num_blocks=512)
        running = [asyncio.create_task(site.run(counting(1000 * i, 200 + i))) for i in range(1, 17)]
        await until(lambda: site.engine.num_admitted == len(running))
        worker.wire = wire = FlippingWire(seed=20)
        announcing = asyncio.create_task(keep_announcing(site, worker))
        for i, messages in enumerate(await asyncio.gather(*running), start=1):
            assert tokens_in(messages) == list(range(1000 * i + 1, 1000 * i + 201 + i))
        assert wire.num_damaged == NUM_DAMAGED
        assert NUM_DAMAGED / 2 <= worker.num_streams - 1 <= NUM_DAMAGED  # of the two on a stream both may be damaged
        announcing.cancel()
        await site.idle()


@pytest.mark.parametrize("are_answers", [True, False])
async def test_bits_that_flip_again_and_again_at_one_place_are_nobodys_fault(are_answers: bool) -> None:
    num_left = 6  # each at the place of the last: half as many deaths of its workers would fail a request

    def flip_one(data: bytes) -> bytes:
        nonlocal num_left
        is_answer = data[-CHECKSUM_BYTES] == RESPONSE_TAG
        if num_left == 0 or is_answer is not are_answers:
            return data
        num_left -= 1
        return bytes([data[0] ^ 1]) + data[1:]

    async with running_site() as site:
        worker = await site.add_worker()
        worker.wire = flip_one
        announcing = asyncio.create_task(keep_announcing(site, worker))
        assert tokens_in(await site.run(counting(10, 8))) == list(range(11, 19))
        assert num_left == 0
        announcing.cancel()
        await site.idle()
