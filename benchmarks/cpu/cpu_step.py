"""A step on a CPU by its parts: products, head, attention, what lies between, greedy choice, and the runner's own time.

A random model of the shape that the peers are compared on decodes at several numbers of rows, in this process, without
services. Prints a table and writes JSON.

    python -m benchmarks.cpu.cpu_step [--shape 216m] [--dtype bfloat16] [--weight-dtype int8] [--rows 1 4 8 32 64]
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.page_section import CPU_WORKER, Document, Headline, PageSection, Section, grid, listed
from benchmarks.random_models import SHAPES, ModelShape, write_random_model
from benchmarks.report import RESULTS, table, write_result
from common.sampling_params import SequenceSampling
from common.step import SequenceState, Step
from kernels.attention.paged_attention import RaggedRows
from kernels.layers.layer_ops import Activation
from kernels.native.cpu_kernels import CpuKernels, CpuPlan, GreedyTokens, HeadNorms, LayerCache, NormRule
from worker_svc.cpu.host_decoder import HostDecoder
from worker_svc.cpu.runner import CpuRunner
from worker_svc.cpu.start import choose_host
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.decoder import Decoder, load_decoder
from worker_svc.model.layers import MakeProduct, Product
from worker_svc.steps.step_limits import StepLimits

SHAPE = "125m"
SMALL_SHAPE = replace(SHAPES[SHAPE], hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=512)
_BLOCK_SIZE = 16
_GREEDY = SequenceSampling(seed=0, temperature=0.0)
NUM_WARM_UP = 3


class PartClock:
    """Milliseconds by part since it was last read."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - began_s

    def read(self) -> dict[str, float]:
        read = {name: 1e3 * seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return read


class TimedProduct:
    """A product whose time counts as a part."""

    def __init__(self, product: Product, clock: PartClock, part: str) -> None:
        self._product, self._clock, self._part = product, clock, part
        self.nbytes = product.nbytes

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        with self._clock.part(self._part):
            return self._product(x, out)


class TimedKernels:
    """Kernels whose time counts as parts."""

    def __init__(self, kernels: CpuKernels, clock: PartClock) -> None:
        self._kernels, self._clock = kernels, clock
        self.name, self.block_layout, self.sampling = kernels.name, kernels.block_layout, kernels.sampling

    def plan(
        self, rows: RaggedRows, cache: LayerCache, sliding_window: int | None, *, is_second: bool = False
    ) -> CpuPlan:
        with self._clock.part("attention"):
            return self._kernels.plan(rows, cache, sliding_window, is_second=is_second)

    def attend(self, query: Tensor, cache: LayerCache, plan: CpuPlan, scale: float, out: Tensor) -> None:
        with self._clock.part("attention"):
            self._kernels.attend(query, cache, plan, scale, out)

    def rotate_and_write(
        self,
        qkv: Tensor,
        rotary: Tensor | None,
        positions: Tensor,
        slot_mapping: Tensor,
        cache: LayerCache,
        norms: HeadNorms | None = None,
    ) -> None:
        with self._clock.part("rotate and write"):
            self._kernels.rotate_and_write(qkv, rotary, positions, slot_mapping, cache, norms)

    def add_norm(self, x: Tensor, residual: Tensor | None, norm: NormRule, out: Tensor) -> None:
        with self._clock.part("norms"):
            self._kernels.add_norm(x, residual, norm, out)

    def gated_activation(self, gate_up: Tensor, activation: Activation, out: Tensor) -> None:
        with self._clock.part("activations"):
            self._kernels.gated_activation(gate_up, activation, out)

    def activation(self, x: Tensor, activation: Activation, out: Tensor) -> None:
        with self._clock.part("activations"):
            self._kernels.activation(x, activation, out)

    def gather_rows(self, x: Tensor, rows: Tensor, out: Tensor) -> None:
        self._kernels.gather_rows(x, rows, out)

    def embed(self, table: Tensor, token_ids: Tensor, out: Tensor, first_id: int = 0) -> None:
        self._kernels.embed(table, token_ids, out, first_id)

    def copy_rows(self, x: Tensor, out: Tensor) -> None:
        self._kernels.copy_rows(x, out)

    def greedy(self, logits: Tensor, out: GreedyTokens) -> None:
        with self._clock.part("greedy"):
            self._kernels.greedy(logits, out)


PARTS = ("products", "head", "attention", "rotate and write", "norms", "activations", "greedy")


def timed_decoder(decoder: Decoder, clock: PartClock) -> Decoder:
    """Copy the decoder, with clocks around its products."""
    layers = tuple(
        replace(
            layer,
            attention=replace(
                layer.attention,
                qkv=TimedProduct(layer.attention.qkv, clock, "products"),
                out=TimedProduct(layer.attention.out, clock, "products"),
            ),
            mlp=replace(
                layer.mlp,
                up=TimedProduct(layer.mlp.up, clock, "products"),
                down=TimedProduct(layer.mlp.down, clock, "products"),
            ),
        )
        for layer in decoder.layers
    )
    return replace(decoder, layers=layers, head=TimedProduct(decoder.head, clock, "head"))


def measure(decoder: Decoder, kernels: CpuKernels, num_rows: int, context: int, num_steps: int) -> dict[str, float]:
    """Median milliseconds of decode steps of `num_rows` rows: by part, kernel by kernel, and as served."""
    clock = PartClock()
    timed = TimedKernels(kernels, clock)
    by_parts = decode_steps(HostDecoder(timed_decoder(decoder, clock), timed), num_rows, context, num_steps)
    samples: list[dict[str, float]] = []
    clock.read()
    for total in by_parts:
        parts = clock.read()
        samples.append({**parts, "the rest": total - sum(parts.values()), "kernel by kernel": total})
    measured = samples[NUM_WARM_UP:]
    medians = {part: round(statistics.median(each[part] for each in measured), 3) for part in measured[0]}
    as_served = list(decode_steps(HostDecoder(decoder, kernels), num_rows, context, num_steps))
    return {**medians, "step": round(statistics.median(as_served[NUM_WARM_UP:]), 3)}


def decode_steps(model: HostDecoder, num_rows: int, context: int, num_steps: int) -> Iterator[float]:
    """Milliseconds of each decode step, warm-up steps included; the processor is idle between two of them."""
    limits = StepLimits(
        num_seats=num_rows,
        num_blocks=num_rows * blocks_per_row(context, num_steps, _BLOCK_SIZE),
        num_host_blocks=0,
        block_size=_BLOCK_SIZE,
        vocab_size=model.config.vocab_size,
        max_model_len=model.config.max_model_len,
        max_batched_tokens=max(num_rows, context),
    )
    pool = KVPool(model.block_shape(_BLOCK_SIZE), limits.num_blocks, model.device)
    yield from timed_steps(CpuRunner(model, pool, limits), num_rows, context, num_steps, _BLOCK_SIZE)


def blocks_per_row(context: int, num_steps: int, block_size: int) -> int:
    """Blocks that a row of `timed_steps` fills."""
    return -(-(context + num_steps + NUM_WARM_UP + 1) // block_size)


def timed_steps(runner: CpuRunner, num_rows: int, context: int, num_steps: int, block_size: int) -> Iterator[float]:
    """Compute prompts of `context` tokens, then yield the milliseconds of each decode step, with warm-up steps."""
    num_blocks = blocks_per_row(context, num_steps, block_size)
    for row in range(num_rows):
        state = SequenceState(
            seat=row,
            position=0,
            block_table=list(range(row * num_blocks, (row + 1) * num_blocks)),
            token_ids=[3 + (7 * row + i) % 400 for i in range(context)],
            num_prompt_tokens=context,
            sampling=_GREEDY,
        )
        runner.launch(Step(epoch=1, step_id=row, snapshot=row == 0, whole=[state], rows=[row], num_tokens=[context]))
    for number in range(NUM_WARM_UP + num_steps):
        began_s = time.perf_counter()
        runner.launch(Step(epoch=1, step_id=num_rows + number, rows=list(range(num_rows))))
        yield 1e3 * (time.perf_counter() - began_s)


def random_decoder(shape: ModelShape, dtype: torch.dtype, make_product: MakeProduct) -> Decoder:
    """Make a decoder with random weights, in memory."""
    with tempfile.TemporaryDirectory(prefix="quire-cpu-step-") as folder:
        write_random_model(shape, Path(folder), torch.device("cpu"), dtype=dtype)
        return load_decoder(Path(folder), dtype, torch.device("cpu"), make_product)


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--weight-dtype", choices=("auto", "int8"), default="auto")
    parser.add_argument("--kernels", choices=("auto", "native", "torch"), default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 32, 64])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--shape", choices=SHAPES, default=SHAPE)
    parser.add_argument("--small", action="store_true", help="a tiny model: a smoke test")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    host = choose_host(options.kernels, dtype, int8_weights=options.weight_dtype == "int8", int8_kv=False)
    shape = SMALL_SHAPE if options.small else SHAPES[options.shape]
    decoder = random_decoder(shape, dtype, host.packing.make_product)
    steps = {rows: measure(decoder, host.kernels, rows, options.context, options.steps) for rows in options.rows}
    print(_as_table(steps))
    figures = {
        "model": {"parameters": decoder.num_parameters, "dtype": options.dtype, "weights": host.packing.name},
        "kernels": host.kernels.name,
        "threads": torch.get_num_threads(),
        "context": options.context,
        "milliseconds": {str(rows): parts for rows, parts in steps.items()},
    }
    shape_name = "" if options.shape == SHAPE else f"{options.shape}_"
    write_result(options.out / f"cpu_step_{shape_name}{options.dtype}_{options.weight_dtype}.json", "cpu_step", figures)


def _as_table(steps: dict[int, dict[str, float]]) -> str:
    parts: Sequence[str] = [*PARTS, "the rest", "kernel by kernel", "step"]
    return table(
        ["ms", *(f"{rows} rows" for rows in steps)], [[part, *(s[part] for s in steps.values())] for part in parts]
    )


def section_of(document: Document) -> Section:
    steps: dict[str, dict[str, float]] = document["milliseconds"]
    model = document["model"]
    parts = dict.fromkeys(part for each in steps.values() for part in each)
    cells = [[part, *(f"{each[part]:.3f}" if part in each else None for each in steps.values())] for part in parts]
    fastest = listed(f"{each['step']:.1f}" for each in steps.values())
    return Section(
        variant=f"{model['dtype']}, weights {model['weights']}",
        done=(
            f"A random model of {model['parameters'] / 1e6:.0f} M parameters decodes in this process, without "
            f"services, at a context of {document['context']}. Medians, milliseconds; kernels: "
            f"{document['kernels']}; {document['threads']} threads."
        ),
        headlines=[Headline(f"{fastest} ms a step of {listed(steps)} rows")],
        blocks=[grid(("", *(f"{rows} rows" for rows in steps)), cells)],
        versions=("torch",),
    )


SECTION = PageSection(
    kinds=("cpu_step",),
    title="A step on a CPU",
    question="What does a decode step on a CPU take, part by part?",
    command="python -m benchmarks.cpu.cpu_step",
    measures=(*CPU_WORKER, "benchmarks/cpu/cpu_step.py"),
    render=section_of,
)


if __name__ == "__main__":
    main()
