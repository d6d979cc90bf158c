"""Loads under memory pressure for as long as one likes: models, pools, block sizes, limits and mixtures at random.

    python -m tests.e2e.pressure_soak --rounds 50 --seed 1

Each round compares runs in small pools with one in a large pool, as `test_memory_pressure` does; half of them are
disturbed by requests that are given up and by pins that come and go. The first that differs, hangs or leaks ends it,
and its line says how to repeat it.
"""

import argparse
import asyncio
import random
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lengths import LengthSampler
from tests.e2e.model_site import ModelSite
from tests.e2e.pressure_load import Ask, Margins, Shape, mixed_asks
from tests.e2e.pressure_run import answers_of, run_asks
from tests.equality import MAX_CUT_FRACTION
from tests.services import DEMO_MODEL
from tests.worker.tiny_models import VOCAB_SIZE, write_tiny_model

NUM_RUNS = 4  # in small pools, each round
ROUND_TIMEOUT_S = 900.0
SHAPES = {
    "mixed": Shape(vocab_size=VOCAB_SIZE),
    "long outputs": Shape(vocab_size=VOCAB_SIZE, prefix_lengths=(8,), max_own_prompt=8, max_output=120),
    "long prompts": Shape(vocab_size=VOCAB_SIZE, prefix_lengths=(64, 128), max_own_prompt=40, max_output=12),
    "short": Shape(vocab_size=VOCAB_SIZE, prefix_lengths=(3, 16), max_own_prompt=4, max_output=9),
}
# The model is near a tie about once in 20,000 tokens, so long outputs have one more often than the 1 % of short ones.
MAX_CUT_FRACTION_OF_LONG = 0.1
FAMILIES = ("llama_gqa", "opt", "gpt2", "mistral", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Settings that all runs of a round share."""

    model: str
    asks: list[Ask]
    block_size: int
    num_blocks: int
    host_blocks: int
    max_cut_fraction: float  # of outputs, at near ties

    @property
    def pool(self) -> tuple[str, ...]:
        sizes = {"block-size": self.block_size, "num-blocks": self.num_blocks, "num-host-blocks": self.host_blocks}
        return tuple(part for name, size in sizes.items() for part in (f"--{name}", str(size)))

    def __str__(self) -> str:
        return (
            f"{self.model}, {len(self.asks)} requests, {self.num_blocks} blocks of {self.block_size}, "
            f"{self.host_blocks} on the host"
        )


def random_round(rng: random.Random, num_requests: int) -> Round:
    """A pool of 1 to 1.5 times what the largest request may need, and a host pool of any size."""
    shape = rng.choice(list(SHAPES))
    asks = mixed_asks(rng.randrange(2**32), num_requests, SHAPES[shape])
    return _round(rng, rng.choice(FAMILIES), asks, rng.choice([1, 2, 4, 8, 16]), MAX_CUT_FRACTION)


def sharegpt_round(rng: random.Random, num_requests: int) -> Round:
    """Lengths as in the paper's ShareGPT trace, with the demo model, which has a context of 2,048 tokens."""
    shape = Shape(vocab_size=2048, prefix_lengths=(64, 256), max_own_prompt=1, max_output=2)
    lengths = LengthSampler("sharegpt", rng.randrange(2**32)).draw(num_requests)
    asks = mixed_asks(rng.randrange(2**32), num_requests, shape, lengths=lengths)
    return _round(rng, "demo", asks, 16, MAX_CUT_FRACTION_OF_LONG)


def _round(rng: random.Random, model: str, asks: list[Ask], block_size: int, max_cut_fraction: float) -> Round:
    largest = max(ask.num_worst_case_blocks(block_size) for ask in asks)
    # Of every pool a hundredth stays free for those that run, and is not promised.
    num_blocks = -(-int(rng.choice([1.0, 1.05, 1.2, 1.5]) * largest * 100) // 99)
    host_blocks = rng.choice([0, largest // 4, largest, 10 * largest])
    return Round(
        model=model,
        asks=asks,
        block_size=block_size,
        num_blocks=num_blocks + 1,
        host_blocks=host_blocks,
        max_cut_fraction=max_cut_fraction,
    )


def random_flags(rng: random.Random) -> tuple[str, ...]:
    """Draw the flags of a scheduler."""
    flags = ["--preemption", rng.choice(["swap", "recompute", "auto"]), "--pipeline-depth", rng.choice(["1", "2", "2"])]
    flags += ["--max-batched-tokens", rng.choice(["5", "17", "48", "512"])]
    flags += rng.choice([[], [], ["--preempt-every", rng.choice(["2", "3", "7"])]])
    flags += rng.choice([[], [], ["--max-num-seqs", rng.choice(["4", "6", "9"])]])
    flags += rng.choice([[], [], ["--no-prefix-cache"], ["--step-form", "whole"], ["--order", "edf"]])
    return tuple(flags)


def soak(one: Round, folder: Path, rng: random.Random) -> None:
    """The round's runs, each under other flags, some with two workers."""
    roomy, tight = ModelSite(folder), ModelSite(folder)
    plenty = sum(ask.num_worst_case_blocks(one.block_size) for ask in one.asks)
    with ExitStack() as stack:
        with roomy.start_worker("roomy", "--block-size", str(one.block_size), "--num-blocks", str(plenty)):
            stack.enter_context(tight.start_worker("first", *one.pool))
            reference = asyncio.run(run_asks(roomy, one.asks, timeout_s=ROUND_TIMEOUT_S))
        answers = answers_of(reference, one.asks, Margins(roomy.reference))
        for number in range(NUM_RUNS):
            flags, num_workers = random_flags(rng), 1
            if number == NUM_RUNS - 1:
                stack.enter_context(tight.start_worker("second", *one.pool))
                num_workers = 2
            disturbance_seed = rng.choice([None, number])
            disturbed = "undisturbed," if disturbance_seed is None else "disturbed,"
            print("   ", num_workers, "workers,", disturbed, *flags, flush=True)  # noqa: T201
            run = asyncio.run(
                run_asks(
                    tight,
                    one.asks,
                    *flags,
                    num_workers=num_workers,
                    timeout_s=ROUND_TIMEOUT_S,
                    disturbance_seed=disturbance_seed,
                )
            )
            answers.assert_same(run, one.max_cut_fraction)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare answers under memory pressure with answers without.")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the next has the next")
    parser.add_argument("--lengths", choices=["random", "sharegpt"], default="random")
    args = parser.parse_args()
    for seed in range(args.seed, args.seed + args.rounds):
        rng = random.Random(seed)
        one = (random_round if args.lengths == "random" else sharegpt_round)(rng, args.requests)
        print(f"seed {seed}: {one}", flush=True)  # noqa: T201
        start_s = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            folder = DEMO_MODEL if one.model == "demo" else write_tiny_model(one.model, Path(name), seed=seed)
            soak(one, folder, rng)
        print(f"seed {seed}: equal, {time.monotonic() - start_s:.0f} s", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
