"""Blocks moved by a runner: copies, swaps out and in, and sequences that go on from them."""

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from common.step import Step
from kernels.native.torch_kernels import TorchKernels
from tests.worker.runners import BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS, MakeRunner, limits_for
from tests.worker.step_client import StepClient
from tests.worker.steps import seat_state
from tests.worker.tiny_models import random_prompts
from worker_svc.cpu.host_decoder import HostDecoder
from worker_svc.cpu.runner import CpuRunner
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.decoder import Decoder

PROMPT, OTHER = random_prompts([9, 11])


def bits(blocks: Tensor) -> Tensor:
    """Reinterpret as integers, so that NaN equals NaN."""
    return blocks.clone().view(torch.int32)


def pairs(*columns: list[int]) -> list[int]:
    return [number for pair in zip(*columns, strict=True) for number in pair]


def greedy_tokens(make_runner: MakeRunner, decoder: Decoder, prompt: list[int], num_tokens: int) -> list[int]:
    client = StepClient(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    client.add(prompt)
    runner, _ = make_runner(decoder)
    while not client.is_done(num_tokens):
        step = client.next_step(64)
        client.take(step, runner.run(step))
    return client.outputs(num_tokens)[0]


def test_a_sequence_goes_on_from_copied_blocks(make_runner: MakeRunner, decoder: Decoder) -> None:
    runner, _ = make_runner(decoder)
    start = Step(epoch=1, step_id=1, snapshot=True, whole=[seat_state(0, PROMPT, [5, 6, 7])], rows=[0], num_tokens=[9])
    first = list(runner.run(start).token_ids)
    moved = seat_state(0, first, [40, 41, 42], position=9, num_prompt_tokens=9)
    result = runner.run(Step(epoch=1, step_id=2, copies=[5, 40, 6, 41, 7, 42], whole=[moved], rows=[0]))
    assert [*first, *result.token_ids] == greedy_tokens(make_runner, decoder, PROMPT, 2)
    assert result.swap_ns == 0


def test_a_swapped_sequence_comes_back_bit_by_bit_though_others_had_its_blocks(
    make_runner: MakeRunner, decoder: Decoder
) -> None:
    """The other one computes in the very step that swaps the first out, and leaves in the one that swaps it in."""
    runner, pool = make_runner(decoder)
    device, host, other_host, elsewhere = [5, 6, 7], [2, 0, 3], [7, 1, 9], [7, 40, 6]
    start = Step(epoch=1, step_id=1, snapshot=True, whole=[seat_state(0, PROMPT, device)], rows=[0], num_tokens=[9])
    tokens = list(runner.run(start).token_ids)
    before = bits(pool.blocks[device])
    other = seat_state(0, OTHER, [6, 7, 5])
    step = Step(epoch=1, step_id=2, freed_seats=[0], swap_out=pairs(device, host), whole=[other], rows=[0])
    step.num_tokens = [11]
    began_ns = time.perf_counter_ns()
    result = runner.run(step)
    other_tokens = list(result.token_ids)
    assert 0 < result.swap_ns < time.perf_counter_ns() - began_ns
    assert torch.equal(bits(pool.host_blocks[host]), before)
    assert not torch.equal(bits(pool.blocks[device]), before)
    result = runner.run(Step(epoch=1, step_id=3, rows=[0]))
    other_tokens += result.token_ids
    assert result.swap_ns == 0
    other_before = bits(pool.blocks[[6, 7, 5]])
    back = seat_state(3, tokens, elsewhere, position=9, num_prompt_tokens=9)
    step = Step(epoch=1, step_id=4, freed_seats=[0], swap_out=pairs([6, 7, 5], other_host), whole=[back], rows=[3])
    step.swap_in = pairs(host, elsewhere)
    tokens += runner.run(step).token_ids
    assert torch.equal(bits(pool.host_blocks[other_host]), other_before)
    assert torch.equal(bits(pool.blocks[elsewhere[:2]]), before[:2])  # the last has one token more
    assert torch.equal(bits(pool.blocks[6, :, :, 0]), before[2, :, :, 0])
    again = seat_state(1, other_tokens[-1:], [50, 51, 52, 53], position=12, num_prompt_tokens=11)
    step = Step(epoch=1, step_id=5, swap_in=pairs(other_host, [50, 51, 52]), whole=[again], rows=[1, 3])
    result = runner.run(step)
    assert [*other_tokens, result.token_ids[0]] == greedy_tokens(make_runner, decoder, OTHER, 3)
    assert [*tokens, result.token_ids[1]] == greedy_tokens(make_runner, decoder, PROMPT, 3)


def test_any_moves_leave_both_pools_as_a_plain_reading_of_them_says(make_runner: MakeRunner, decoder: Decoder) -> None:
    """Out, in, copies, in this order; of each, all sources are read before any destination is written."""
    runner, pool = make_runner(decoder)
    generator = random.Random(1)
    pool.blocks.copy_(torch.randn(pool.blocks.shape, generator=torch.Generator().manual_seed(1)))
    device, host = pool.blocks.clone(), pool.host_blocks.clone()
    for step_id in range(1, 60):
        step = Step(epoch=1, step_id=step_id, snapshot=step_id == 1)
        for name, source, destination in (
            ("swap_out", device, host),
            ("swap_in", host, device),
            ("copies", device, device),
        ):
            count = generator.choice([0, 0, 1, 5, NUM_HOST_BLOCKS])
            sources = generator.choices(range(len(source)), k=count)
            destinations = generator.sample(range(len(destination)), count)
            destination[destinations] = source[sources]  # indexing by a list reads all first
            setattr(step, name, pairs(sources, destinations))
        assert (runner.run(step).swap_ns > 0) == bool(step.swap_out or step.swap_in)
        assert torch.equal(bits(pool.blocks), bits(device))
        assert torch.equal(bits(pool.host_blocks), bits(host))


class NotingPool(KVPool):
    """A pool that notes its moves between device and main memory."""

    def __init__(self, decoder: Decoder, seen: list[str]) -> None:
        super().__init__(decoder.block_shape(BLOCK_SIZE), NUM_BLOCKS, decoder.device, NUM_HOST_BLOCKS, 1)
        self._seen = seen

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._note("swaps out", pairs)
        super().swap_out(pairs)

    def place(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._note("places", pairs)
        super().place(pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._note("swaps in", pairs)
        super().swap_in(pairs)

    def _note(self, what: str, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            self._seen.append(what)


def test_what_waits_for_a_cpus_pass_does_not_wait_for_the_swaps_before_it(decoder: Decoder) -> None:
    """Regression: an answer was held back until the swaps of the step behind it were done.

    Where these took more than 5 s, the scheduler counted the answered step as hung, and gave the worker up.
    """
    seen: list[str] = []
    pool = NotingPool(decoder, seen)
    runner = CpuRunner(HostDecoder(decoder, TorchKernels()), pool, limits_for(decoder))
    runner.before_pass = lambda: seen.append("announces")
    start = Step(epoch=1, step_id=1, snapshot=True, whole=[seat_state(0, PROMPT, [5, 6, 7])], rows=[0], num_tokens=[9])
    runner.launch(start)
    assert seen == ["announces"]
    fetch = runner.fetched.open(1, 1, 1, lambda end: None)
    runner.fetched.write(fetch, 0, memoryview(bytes(pool.shape.bytes_per_block)))
    step = Step(epoch=1, step_id=2, rows=[0])
    for moved in (
        replace(step, swap_out=[5, 2]),
        replace(step, placed=[1, 0, 40]),
        replace(step, swap_in=[2, 41]),
    ):
        seen.clear()
        runner.launch(moved)
        assert seen[0] == "announces" and len(seen) > 1
