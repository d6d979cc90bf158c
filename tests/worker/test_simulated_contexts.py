"""A simulated worker with contexts: its tokens tell what its blocks hold, and its blocks travel."""

from contextlib import AsyncExitStack
from dataclasses import replace
from random import Random

import grpc

from benchmarks.services.simulated_contexts import SimulatedContexts
from benchmarks.services.simulated_worker import SimulatedRunner
from common.step import Step, StepStatus
from tests.services import Service
from tests.worker.step_client import StepClient
from tests.worker.steps import LIMITS, seat_state
from tests.worker.travelling import code_of, until_come, worker_client

SIMULATED = "benchmarks.services.simulated_worker"
PROMPT = [5, 9, 2, 7, 7, 3, 8, 1, 6]  # two blocks of 4 are full
NUM_TOKENS = 6


def make_runner() -> SimulatedRunner:
    contexts = SimulatedContexts(LIMITS, num_fetched_blocks=4)
    return SimulatedRunner(LIMITS, step_ns=0, per_seq_ns=0, per_token_ns=0, contexts=contexts)


def outputs_of(prompts: list[list[int]], chunk: int, seed: int) -> list[list[int]]:
    runner, client = make_runner(), StepClient(num_blocks=LIMITS.num_blocks, block_size=LIMITS.block_size, seed=seed)
    for prompt in prompts:
        client.add(prompt)
    while not client.is_done(NUM_TOKENS):
        step = client.next_step(chunk)
        client.take(step, runner.launch(step))
    return client.outputs(NUM_TOKENS)


def test_tokens_depend_on_the_context_and_not_on_blocks_seats_and_chunks() -> None:
    prompts = [PROMPT, [*PROMPT[:-1], 4], [4]]
    outputs = outputs_of(prompts, chunk=3, seed=1)
    assert outputs == outputs_of(prompts, chunk=8, seed=2)
    assert outputs[0] == outputs_of([PROMPT], chunk=1, seed=3)[0]
    assert len({tuple(output) for output in outputs}) == 3


def test_contexts_follow_copies_and_swaps() -> None:
    random, runner = Random(4), make_runner()
    start = seat_state(0, PROMPT, [3, 9, 20, 21])
    step = Step(epoch=1, step_id=1, snapshot=True, whole=[start], rows=[0], num_tokens=[len(PROMPT)])
    (first,) = runner.launch(step).token_ids
    (second,) = runner.launch(Step(epoch=1, step_id=2, rows=[0])).token_ids
    host = random.sample(range(LIMITS.num_host_blocks), 3)
    away = Step(epoch=1, step_id=3, swap_out=[3, host[0], 9, host[1], 20, host[2]], freed_seats=[0])
    runner.launch(away)
    overwriting = seat_state(1, [1] * 12, [3, 9, 20])
    runner.launch(Step(epoch=1, step_id=4, whole=[overwriting], rows=[1], num_tokens=[12]))
    back = seat_state(0, [first], [5, 6, 8], position=len(PROMPT), num_prompt_tokens=len(PROMPT))
    moves = Step(epoch=1, step_id=5, swap_in=[host[0], 5, host[1], 6, host[2], 7], copies=[7, 8])
    assert list(runner.launch(replace(moves, whole=[back], rows=[0])).token_ids) == [second]


async def test_what_is_decoded_from_travelled_blocks_is_what_their_worker_decodes() -> None:
    flags = ("--contexts", "--step-ms", "0", "--block-size", "4", "--num-blocks", "32", "--max-fetched-blocks", "3")
    async with AsyncExitStack() as stack:
        services = [stack.enter_context(Service(SIMULATED, *flags)) for _ in "12"]
        addresses = [(service.wait_for("ready"), service.wait_for("listening"))[1]["address"] for service in services]
        source, destination = [await stack.enter_async_context(worker_client(each)) for each in addresses]
        whole = [seat_state(0, PROMPT, [7, 3, 9, 10])]
        result = await source.step(snapshot=True, whole=whole, rows=[0], num_tokens=[len(PROMPT)])
        call = destination.fetch(source, [7, 3])
        await until_come(call, 2)
        assert await code_of(destination.fetch(source, [7, 3], fetch_id=2)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        known = [*PROMPT[8:], *result.token_ids]
        seat = seat_state(0, known, [1, 2, 3, 4], position=8, num_prompt_tokens=len(PROMPT))
        there = await destination.step(
            snapshot=True, placed=[1, 0, 1, 1, 1, 2], whole=[seat], rows=[0], num_tokens=[len(known)]
        )
        assert list(there.token_ids) == list((await source.step(rows=[0])).token_ids)
        again = await destination.step(placed=[1, 0, 1])
        assert again.status is StepStatus.NEED_SNAPSHOT
        wrong = replace(seat, seat=1, block_table=[2, 1, 5, 6])
        elsewhere = await destination.step(snapshot=True, whole=[wrong], rows=[1], num_tokens=[len(known)])
        assert list(elsewhere.token_ids) != list(there.token_ids), "a wrong block would be noticed"
