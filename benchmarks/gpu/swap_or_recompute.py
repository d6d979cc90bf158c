"""Cost of bringing a preempted sequence back: by swap, out and in, or by recomputation (Fig. 19a).

At block sizes 1 to 256, each with a pool and a runner of its own, whose steps do it as a worker would; blocks are
scattered at random. The model is LLaMA-shaped with random weights, of 8 B parameters. Needs a GPU; `--device cpu
--small` runs the same code on a tiny model, and its figures mean nothing.

    python -m benchmarks.gpu.swap_or_recompute --out DIR [--tokens N ...] [--shape 8b|1b|tiny] [--model FOLDER]
"""

import argparse
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import count, product
from pathlib import Path
from random import Random
from statistics import median

import torch

from benchmarks.gpu.device_time import device_name
from benchmarks.gpu.random_decoder import random_decoder
from benchmarks.page_section import GPU_WORKER, PageSection
from benchmarks.random_models import SHAPES
from benchmarks.report import table, write_result
from benchmarks.svg_chart import Line, log_log_chart
from common.sampling_params import SequenceSampling
from common.step import SequenceState, Step, StepResult
from worker_svc.gpu import torch_operations, triton_operations
from worker_svc.gpu.graphs import graph_sizes
from worker_svc.gpu.runner import DeviceRunner
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.decoder import Decoder, load_decoder
from worker_svc.steps.step_limits import StepLimits

BLOCK_SIZES = (16, 128, 32, 64, 1, 256, 8, 4, 2)  # what is promised of comes first, should time run out
FLAT_SIZES = range(16, 129)
TOKENS = (512, 2048, 8000)
PLOTTED_TOKENS = 2048
REPEATS = 5
SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of one sequence, in milliseconds, medians."""

    block_size: int
    num_tokens: int
    recompute_ms: float
    swap_out_ms: float
    swap_in_ms: float

    @property
    def swap_ms(self) -> float:
        """Milliseconds of both directions."""
        return self.swap_out_ms + self.swap_in_ms


class PreemptedSequence:
    """A runner with one sequence, which is computed, saved and restored over and over."""

    def __init__(self, decoder: Decoder, block_size: int, num_tokens: int) -> None:
        self._num_blocks = -(-num_tokens // block_size)
        self._num_tokens = num_tokens
        pool = KVPool(decoder.block_shape(block_size), 2 * self._num_blocks, decoder.device, self._num_blocks)
        limits = StepLimits(
            num_seats=1,
            num_blocks=pool.num_blocks,
            num_host_blocks=pool.num_host_blocks,
            block_size=block_size,
            vocab_size=decoder.config.vocab_size,
            max_model_len=decoder.config.max_model_len,
            max_batched_tokens=num_tokens,
        )
        on_gpu = decoder.device.type == "cuda"
        operations = triton_operations.OPERATIONS if on_gpu else torch_operations.OPERATIONS
        self._runner = DeviceRunner(decoder, pool, limits, operations, graph_sizes(limits.num_seats))
        self._step_ids = count(1)
        self._random = Random(SEED)

    def measure(self, repeats: int) -> tuple[float, float, float]:
        """Nanoseconds of computing, of saving, of restoring; the first round pays for what is done once."""
        rounds = [self._round() for _ in range(repeats + 1)][1:]
        recomputed, saved, restored = (median(column) for column in zip(*rounds, strict=True))
        return recomputed, saved, restored

    def _round(self) -> tuple[int, int, int]:
        """Run one round with the whole sequence, in newly drawn blocks."""
        computed_at, restored_to = self._places(), self._places()
        saved_at = self._random.sample(range(self._num_blocks), self._num_blocks)
        state = SequenceState(
            seat=0,
            position=0,
            block_table=computed_at,
            token_ids=[0] * self._num_tokens,
            num_prompt_tokens=self._num_tokens,
            sampling=SequenceSampling(seed=0),
        )
        began_ns = time.perf_counter_ns()
        self._execute(Step(epoch=1, step_id=0, snapshot=True, whole=[state], rows=[0], num_tokens=[self._num_tokens]))
        recompute_ns = time.perf_counter_ns() - began_ns
        saved = self._execute(Step(epoch=1, step_id=0, swap_out=_flat(computed_at, saved_at)))
        restored = self._execute(Step(epoch=1, step_id=0, swap_in=_flat(saved_at, restored_to)))
        return recompute_ns, saved.swap_ns, restored.swap_ns

    def _places(self) -> list[int]:
        return self._random.sample(range(2 * self._num_blocks), self._num_blocks)

    def _execute(self, step: Step) -> StepResult:
        step.step_id = next(self._step_ids)
        return self._runner.launch(step).wait()


def _flat(sources: Sequence[int], destinations: Sequence[int]) -> list[int]:
    return [block for pair in zip(sources, destinations, strict=True) for block in pair]


def measure(
    decoder: Decoder, tokens: Iterable[int], block_sizes: Iterable[int], repeats: int, limit_s: float = math.inf
) -> list[Cost]:
    """Measure all lengths at all block sizes, in order of length and block size; start none after the time limit."""
    costs = []
    began_s = time.monotonic()
    for block_size, num_tokens in product(block_sizes, tokens):
        if time.monotonic() - began_s > limit_s:
            break
        times_ns = PreemptedSequence(decoder, block_size, num_tokens).measure(repeats)
        recompute_ms, swap_out_ms, swap_in_ms = (round(nanoseconds / 1e6, 4) for nanoseconds in times_ns)
        costs.append(
            Cost(
                block_size=block_size,
                num_tokens=num_tokens,
                recompute_ms=recompute_ms,
                swap_out_ms=swap_out_ms,
                swap_in_ms=swap_in_ms,
            )
        )
        if decoder.device.type == "cuda":
            torch.cuda.empty_cache()
    return sorted(costs, key=lambda cost: (cost.num_tokens, cost.block_size))


def swap_spread(costs: Sequence[Cost], num_tokens: int) -> float:
    """Dearest / cheapest swap, both ways, over the block sizes in `FLAT_SIZES`; 1 is flat."""
    own = [cost.swap_ms for cost in costs if cost.num_tokens == num_tokens and cost.block_size in FLAT_SIZES]
    return max(own) / min(own)


def key_figures(costs: Sequence[Cost]) -> dict[str, float]:
    """At block size 16, and how the cost of swaps changes with the block size."""
    figures = {}
    for cost in costs:
        if cost.block_size == 16:
            figures[f"recompute_over_swap_of_{cost.num_tokens}_tokens"] = round(cost.recompute_ms / cost.swap_ms, 2)
            figures[f"swap_spread_of_{cost.num_tokens}_tokens"] = round(swap_spread(costs, cost.num_tokens), 3)
    return figures


def plot(costs: Sequence[Cost], num_tokens: int) -> str:
    """Draw the plot as SVG, in the form of the paper's Fig. 19a."""
    own = [cost for cost in costs if cost.num_tokens == num_tokens]
    lines = [
        Line("recompute", [(cost.block_size, cost.recompute_ms) for cost in own]),
        Line("swap in", [(cost.block_size, cost.swap_in_ms) for cost in own]),
        Line("swap out", [(cost.block_size, cost.swap_out_ms) for cost in own]),
        Line("swap in + out", [(cost.block_size, cost.swap_ms) for cost in own]),
    ]
    return log_log_chart(f"A sequence of {num_tokens:,} tokens", "block size, tokens", "ms", lines)


def main() -> int:
    """Reads the command line and measures; 2 without a GPU."""
    options = parse_arguments()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("This measures a GPU, and there is none here: --device cpu --small runs the same code in small.")
        return 2
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if options.model is not None:
        decoder = load_decoder(options.model, dtype, device)
    else:
        decoder = random_decoder(SHAPES["tiny" if options.small else options.shape], dtype, device)
    tokens = (48, 96) if options.small else sorted(options.tokens)
    costs = measure(decoder, tokens, options.block_sizes, options.repeats, options.limit_s)
    head = ("tokens", "block size", "recompute ms", "swap out ms", "swap in ms", "both ms")
    rows = [
        (c.num_tokens, c.block_size, c.recompute_ms, c.swap_out_ms, c.swap_in_ms, round(c.swap_ms, 4)) for c in costs
    ]
    print(table(head, rows))
    is_measured = device.type == "cuda" and not options.small
    figures = key_figures(costs) if is_measured else {}
    print(
        "\n".join(f"{name}: {value}" for name, value in figures.items())
        or "All of this means nothing but that it runs."
    )
    measured = {(cost.num_tokens, cost.block_size) for cost in costs}
    result = {
        "unit": "milliseconds",
        "device": device_name(device),
        "is_measured": is_measured,
        "num_parameters": decoder.num_parameters,
        "dtype": str(dtype).removeprefix("torch."),
        "repeats": options.repeats,
        "not_measured": [each for each in product(tokens, sorted(options.block_sizes)) if each not in measured],
        "key_figures": figures,
        "rows": [{**asdict(cost), "swap_ms": round(cost.swap_ms, 4)} for cost in costs],
    }
    write_result(options.out / "swap_or_recompute.json", "swap_or_recompute", result)
    plotted = PLOTTED_TOKENS if PLOTTED_TOKENS in tokens else tokens[-1]
    if sum(num_tokens == plotted for num_tokens, _ in measured) > 1:
        (options.out / "swap_or_recompute.svg").write_text(plot(costs, plotted))
    return 0


def parse_arguments() -> argparse.Namespace:
    """Defaults are those of the kept result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b", help="of the random model")
    parser.add_argument("--model", type=Path, help="the folder of a checkpoint, in place of a random model")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="lengths of sequences")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=BLOCK_SIZES, help="16 and some to 128 among them")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--limit-s", type=float, default=75.0, help="no block size is begun later")
    return parser.parse_args()


SECTION = PageSection(
    kinds=("swap_or_recompute",),
    title="Swap or recompute on a GPU",
    question="Is it cheaper to swap a sequence or to compute it again, by block size (Fig. 19)?",
    command="python -m benchmarks.gpu.swap_or_recompute --out DIR",
    measures=GPU_WORKER,
    target="as in Fig. 19",
)


if __name__ == "__main__":
    sys.exit(main())
