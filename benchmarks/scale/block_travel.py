"""Blocks that travel between workers: what roles do for running requests, and how long a request that moves stands.

Real scheduler, store and workers of one thread each, on a model with random weights. *Roles*: the times between two
tokens of running requests, alone and beside one long prompt after another: with a prefill and a decode worker, with two
mixed ones, and, for comparison, with the prompts at another deployment, which shows what a neighbour costs that only
uses the machine. *Moves*: a request with so much context goes on at another worker, as its own one drains; the longest
time between two of its tokens, with its blocks fetched and with its tokens computed again. Rounds are interleaved.
Takes about twelve minutes.

    python -m benchmarks.scale.block_travel [--shape 125m] [--rounds N] [--seconds S] [--contexts N ...]
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.random_models import SHAPES, ModelShape, write_random_model
from benchmarks.report import RESULTS, percentile, table, write_result
from benchmarks.scale.travel_section import APART, MIXED, MOVES_HEAD, ROLES, ROLES_HEAD, move_cells, role_cells
from benchmarks.scale.travel_sites import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    Prompts,
    TokenTimes,
    client_of,
    read,
    running,
    site,
    stream_of_prompts,
)
from common.waits import end_tasks

NUM_RUNNING = 6
RUNNING_PROMPT = 32
PROMPT_LENGTHS = (1000, 1500)
PROMPT_OUTPUT = 4
CONTEXTS = (250, 500, 1000, 2000)
SETTLE_S = 1.0
TOKENS_BEFORE_MOVE = 8
TOKENS_AFTER_MOVE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRound:
    """Milliseconds between two tokens of running requests, alone and beside prompts; and what the prompts got."""

    idle_p50_ms: float
    idle_p99_ms: float
    prompts_p50_ms: float
    prompts_p99_ms: float
    prompts_per_s: float
    first_token_p50_ms: float
    second_token_p50_ms: float  # after the first: a handed over request moves meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRow:
    """Longest milliseconds between two tokens of a request that moves: each round, by context and way."""

    context: int
    fetched_ms: list[float]
    computed_ms: list[float]


async def measure_roles(running_at: str, prompts_at: str, vocab_size: int, seconds: float, seed: int) -> RoleRound:
    """Measure half of the time idle before and half behind the prompts, so that contexts are as long on average."""
    prompts = Prompts(vocab_size, seed)
    async with client_of(running_at) as client, client_of(prompts_at) as other:
        own = [prompts.next(RUNNING_PROMPT) for _ in range(NUM_RUNNING)]
        async with running(client, own) as found:
            idle = [await _span(seconds / 2)]
            async with stream_of_prompts(other, prompts, PROMPT_LENGTHS, PROMPT_OUTPUT) as ended:
                beside = await _span(seconds)
                asked = list(ended)
            idle.append(await _span(seconds / 2))
    idle_ms = [gap for span in idle for gap in _gaps_ms(found, span)]
    beside_ms = _gaps_ms(found, beside)
    return RoleRound(
        idle_p50_ms=round(percentile(idle_ms, 50), 2),
        idle_p99_ms=round(percentile(idle_ms, 99), 2),
        prompts_p50_ms=round(percentile(beside_ms, 50), 2),
        prompts_p99_ms=round(percentile(beside_ms, 99), 2),
        prompts_per_s=round(len(asked) / (seconds + SETTLE_S), 3),
        first_token_p50_ms=round(_median_gap_ms(asked, 0), 1),
        second_token_p50_ms=round(_median_gap_ms(asked, 1), 1),
    )


async def _span(seconds: float) -> tuple[float, float]:
    """Let it settle, wait, and return from when to when."""
    await asyncio.sleep(SETTLE_S)
    from_s = time.monotonic()
    await asyncio.sleep(seconds)
    return from_s, time.monotonic()


def _gaps_ms(found: Sequence[TokenTimes], span: tuple[float, float]) -> list[float]:
    return [1e3 * gap for times in found for gap in times.gaps(*span)]


def _median_gap_ms(asked: Sequence[TokenTimes], index: int) -> float:
    gaps = [each.moments[index + 1] - each.moments[index] for each in asked if len(each.moments) > index + 1]
    return 1e3 * median(gaps) if gaps else 0.0


async def measure_move(address: str, context: int, prompt: list[int]) -> float:
    """Run a request on one worker, drain it, and return the longest milliseconds between two tokens from then on."""
    async with client_of(address) as client:
        here, there = sorted(each.worker_id for each in (await client.stats()).workers)
        await client.drain_worker(here, undo=True)
        await client.drain_worker(there)
        times = TokenTimes()
        own = prompt[: context - TOKENS_BEFORE_MOVE]
        # As long as it can be: a small model would put out a few tokens before the worker drains.
        task = asyncio.create_task(read(client, own, MAX_MODEL_LEN - len(own), times))
        await times.until(TOKENS_BEFORE_MOVE)
        await client.drain_worker(there, undo=True)
        moved_s = times.moments[-1]
        await client.drain_worker(here)
        assert not task.done(), "the request has ended before it could move"
        await times.until(times.num_tokens + TOKENS_AFTER_MOVE)
        await end_tasks(task)
        return 1e3 * max(times.gaps(moved_s, time.monotonic()))


async def fetch_speed(address: str) -> float | None:
    """Blocks a second that the scheduler has measured for fetches."""
    async with client_of(address) as client:
        speeds = [each.fetch_blocks_per_s for each in (await client.stats()).workers]
    return max((speed for speed in speeds if speed is not None), default=None)


async def measure_all_roles(
    where: dict[str, tuple[str, str]], vocab_size: int, rounds: int, seconds: float
) -> dict[str, list[RoleRound]]:
    """Measure all placements in turn, round after round. `where`: the addresses for running requests and prompts."""
    found: dict[str, list[RoleRound]] = {placement: [] for placement in where}
    for seed in range(rounds):
        for placement, (running_at, prompts_at) in where.items():
            found[placement].append(await measure_roles(running_at, prompts_at, vocab_size, seconds, seed))
            print(placement, found[placement][-1], flush=True)
    return found


async def measure_all_moves(
    fetched: str, computed: str, vocab_size: int, rounds: int, contexts: Sequence[int]
) -> list[MoveRow]:
    """Measure all contexts both ways in turn, round after round. A first one warms up."""
    rows = [MoveRow(context=context, fetched_ms=[], computed_ms=[]) for context in contexts]
    prompts = Prompts(vocab_size, 1)
    for number in range(rounds + 1):
        for row in rows:
            prompt = prompts.next(row.context)
            for address, times in ((fetched, row.fetched_ms), (computed, row.computed_ms)):
                took_ms = await measure_move(address, row.context, prompt)
                times += [round(took_ms, 1)] if number else []
    print(*rows, sep="\n", flush=True)
    return rows


def roles(model: Path, dtype: str, shape: ModelShape, rounds: int, seconds: float) -> dict[str, list[RoleRound]]:
    """Start the deployments of all placements, and measure them."""
    with ExitStack() as stack:
        parted = stack.enter_context(site(model, dtype, [("p", "prefill"), ("d", "decode")]))
        mixed = stack.enter_context(site(model, dtype, [("m0", "mixed"), ("m1", "mixed")]))
        lone, other = (stack.enter_context(site(model, dtype, [("m", "mixed")])) for _ in range(2))
        where = {ROLES: (parted, parted), MIXED: (mixed, mixed), APART: (lone, other)}
        return asyncio.run(measure_all_roles(where, shape.vocab_size, rounds, seconds))


def moves(
    model: Path, dtype: str, shape: ModelShape, rounds: int, contexts: Sequence[int]
) -> tuple[list[MoveRow], float | None]:
    """Start two deployments, and measure moves between their workers, and the speed of fetches."""
    two = [("m0", "mixed"), ("m1", "mixed")]
    with ExitStack() as stack:
        ways = ("always", "never")
        fetched, computed = (stack.enter_context(site(model, dtype, two, "--block-fetch", way)) for way in ways)

        async def measure() -> tuple[list[MoveRow], float | None]:
            rows = await measure_all_moves(fetched, computed, shape.vocab_size, rounds, contexts)
            return rows, await fetch_speed(fetched)

        return asyncio.run(measure())


def main() -> None:
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="125m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the model and its KV")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="idle, and beside prompts, in each round")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens of requests that move")
    parser.add_argument("--output", type=Path, default=RESULTS / "block_travel.json")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        write_random_model(shape, model := Path(folder) / "model", torch.device("cpu"))
        found = roles(model, options.dtype, shape, options.rounds, options.seconds)
        rows, blocks_per_s = moves(model, options.dtype, shape, options.rounds, options.contexts)
    value_bytes = 2 if options.dtype == "bfloat16" else 4
    figures: dict[str, Any] = {
        "shape": options.shape,
        "dtype": options.dtype,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "cores": os.cpu_count(),
        "running": NUM_RUNNING,
        "prompt_lengths": PROMPT_LENGTHS,
        "prompt_output": PROMPT_OUTPUT,
        "bytes_per_block": BLOCK_SIZE * shape.kv_values_per_token * value_bytes,
        "fetch_blocks_per_s": blocks_per_s,
        "roles": {name: [asdict(each) for each in measured] for name, measured in found.items()},
        "moves": [asdict(row) for row in rows],
    }
    print(table(ROLES_HEAD, role_cells(figures["roles"])))
    print(table(MOVES_HEAD, move_cells(figures["moves"])))
    print("fetches:", blocks_per_s, "blocks/s")
    write_result(options.output, "block_travel", figures)


if __name__ == "__main__":
    main()
