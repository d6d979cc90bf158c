"""Every benchmark that keeps a result, in the order of the page: its question, its command, and what makes its section.

A kind of result that is not here has no section, and the page is not made.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.results_page import cpu, durability, iterations, memory
from benchmarks.results_page.section import Document, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One kind of result."""

    kinds: Sequence[str]  # as the files say, the newest name first
    title: str
    question: str
    command: str
    measures: Sequence[str]  # paths of the code whose change makes a result one of older code
    target: str | None = None  # shown for as long as there is no result
    render: Callable[[Document], Section] | None = None  # None: to be written with the first result


SERVICES = ("common", "quire", "scheduler_svc", "worker_svc", "kernels/native")
SCHEDULER = ("common", "quire", "scheduler_svc")
CORE = ("scheduler_svc/core",)
CPU_WORKER = ("worker_svc", "kernels/native")
GPU_WORKER = ("worker_svc", "kernels")

BENCHMARKS = (
    Benchmark(
        kinds=("peers",),
        title="Beside other engines on a CPU",
        question="How many tokens a second, beside other engines, on the same model, requests and machine?",
        command="python -m benchmarks.peers",
        measures=(*SERVICES, "benchmarks/peers", "benchmarks/services/model_services.py"),
        target="1.05 × the best peer at once, 1.2 × with long prompts; no worse at 1, 2 and 4 requests a second",
        render=cpu.peers,
    ),
    Benchmark(
        kinds=("cpu_step",),
        title="A step on a CPU",
        question="What does a decode step on a CPU take, part by part?",
        command="python -m benchmarks.cpu.cpu_step",
        measures=(*CPU_WORKER, "benchmarks/cpu/cpu_step.py"),
        render=cpu.cpu_step,
    ),
    Benchmark(
        kinds=("cpu_attention",),
        title="Attention on a CPU",
        question="How near does attention over blocks come to the read bandwidth?",
        command="python -m benchmarks.cpu.cpu_attention",
        measures=("kernels/native", "benchmarks/cpu/cpu_attention.py"),
        target="at context 2,048 and batch 32: 65 % in float32, 50 % in bfloat16",
        render=cpu.cpu_attention,
    ),
    Benchmark(
        kinds=("int8_speed",),
        title="Speed of int8 weights",
        question="How much faster is a step on a CPU with weights in int8?",
        command="python -m benchmarks.cpu.int8_speed",
        measures=(*CPU_WORKER, "benchmarks/cpu/int8_speed.py"),
        target="1.4 × bfloat16 at one row",
        render=cpu.int8_speed,
    ),
    Benchmark(
        kinds=("accuracy",),
        title="Accuracy of int8",
        question="What do weights, and keys and values, in int8 cost in accuracy?",
        command="python -m benchmarks.cpu.accuracy",
        measures=(*CPU_WORKER, "benchmarks/cpu/accuracy.py"),
        target="loss within 0.5 % of float32's",
        render=cpu.accuracy,
    ),
    Benchmark(
        kinds=("overhead", "step_overhead"),
        title="Overhead of an iteration",
        question="What does an iteration cost beside the execution of its step, and do readers keep up?",
        command="python -m benchmarks.overhead",
        measures=SERVICES,
        target="< 1 ms at depth 1, < 0.3 ms at depth 2; ≥ 20,000 tokens/s without a lag that grows",
        render=iterations.overhead,
    ),
    Benchmark(
        kinds=("scale",),
        title="Growth",
        question="How do costs grow with running sequences, queued requests, and the journal?",
        command="python -m benchmarks.scale",
        measures=SCHEDULER,
        render=iterations.scale,
    ),
    Benchmark(
        kinds=("schedule_cost",),
        title="Cost of a decision",
        question="What does a decision of the scheduler cost, from 16 to 4,096 sequences?",
        command="python -m benchmarks.scale.schedule_cost",
        measures=CORE,
        target="< 0.5 ms at 256 sequences, no worse than linear",
        render=iterations.schedule_cost,
    ),
    Benchmark(
        kinds=("journal_cost",),
        title="Cost of the journal",
        question="What does the journal cost, and when is an entry durable?",
        command="python -m benchmarks.durability.journal_cost",
        measures=SCHEDULER,
        target="≤ 0.2 ms of CPU per iteration",
        render=iterations.journal_cost,
    ),
    Benchmark(
        kinds=("durability_cost",),
        title="Cost of durability",
        question="What does durability cost in throughput?",
        command="python -m benchmarks.durability.durability_cost",
        measures=SERVICES,
        target="≥ 97 % at `always`",
        render=durability.durability_cost,
    ),
    Benchmark(
        kinds=("recovery_time",),
        title="Recovery",
        question="How long does a new scheduler take to the first new token, with a full journal?",
        command="python -m benchmarks.durability.recovery_time",
        measures=SCHEDULER,
        target="≤ 3 s",
        render=durability.recovery_time,
    ),
    Benchmark(
        kinds=("failover_time",),
        title="Failover",
        question="With a hot standby: how long does no token come, when the leader is killed or told to end?",
        command="python -m benchmarks.durability.failover_time",
        measures=SCHEDULER,
        target="≤ 2.25 s of silence after kill -9, < 0.1 s without a leader in a hand-over",
        render=durability.failover_time,
    ),
    Benchmark(
        kinds=("chaos",),
        title="Faults",
        question="Does every promise hold while real processes are killed, frozen and cut off?",
        command="python -m tests.chaos",
        measures=(*SERVICES, "tests/chaos"),
        target="nothing lost, duplicated, missing or changed",
        render=durability.chaos,
    ),
    Benchmark(
        kinds=("simulation",),
        title="Simulation",
        question="Does every promise hold under injected faults, seed after seed, in virtual time?",
        command="python -m tests.simulation --record",
        measures=(*SCHEDULER, "tests/simulation"),
        target="no seed fails",
        render=durability.simulation,
    ),
    Benchmark(
        kinds=("kv_utilisation",),
        title="KV utilisation",
        question="How full is a full KV pool, and where is the rest?",
        command="python -m benchmarks.memory.kv_utilisation",
        measures=CORE,
        target="≥ 94 % on ShareGPT, ≥ 89 % on Alpaca",
        render=memory.kv_utilisation,
    ),
    Benchmark(
        kinds=("memory_saving",),
        title="Savings by sharing",
        question="What does sharing save of the KV memory?",
        command="python -m benchmarks.memory.memory_saving",
        measures=CORE,
        target="within 1 point of the paper (parallel sampling, Alpaca)",
        render=memory.memory_saving,
    ),
    Benchmark(
        kinds=("prefix_reuse",),
        title="Prefix reuse",
        question="What does a prefix cost that many requests share?",
        command="python -m benchmarks.memory.prefix_reuse",
        measures=SERVICES,
        target="computed once",
        render=memory.prefix_reuse,
    ),
    Benchmark(
        kinds=("paper",),
        title="The paper's evaluation",
        question="Do the paper's figures come out again, in virtual time?",
        command="python -m benchmarks.paper",
        measures=(*CORE, "benchmarks/paper"),
        target="all comparisons within their bounds",
        render=memory.paper,
    ),
    Benchmark(
        kinds=("kernels",),
        title="Kernels on a GPU",
        question="How near do the kernels come to what the device can do?",
        command="python -m benchmarks.gpu.kernels --out DIR",
        measures=("kernels",),
        target="decode ≥ 85 % of read bandwidth, prefill ≥ 350 TFLOP/s, cascade ≥ 3 × plain decode, paging < 5 %",
    ),
    Benchmark(
        kinds=("decode_step",),
        title="A decode step on a GPU",
        question="What does a decode step of an 8 B model cost, scheduler and wire included?",
        command="python -m benchmarks.gpu.decode_step --out DIR",
        measures=GPU_WORKER,
        target="≤ 1.25 × the time in which its bytes can be read",
    ),
    Benchmark(
        kinds=("against_transformers",),
        title="Against transformers on a GPU",
        question="How many tokens a second, against `transformers`' continuous batching?",
        command="python -m benchmarks.gpu.against_transformers --out DIR",
        measures=GPU_WORKER,
        target="≥ 2 ×",
    ),
    Benchmark(
        kinds=("block_moves",),
        title="Copies and swaps on a GPU",
        question="What do copy-on-write and swap reach of one contiguous copy?",
        command="python -m benchmarks.gpu.block_moves --out DIR",
        measures=GPU_WORKER,
        target="≥ 80 % of one contiguous copy",
    ),
    Benchmark(
        kinds=("swap_or_recompute",),
        title="Swap or recompute on a GPU",
        question="Is it cheaper to swap a sequence or to compute it again, by block size (Fig. 19)?",
        command="python -m benchmarks.gpu.swap_or_recompute --out DIR",
        measures=GPU_WORKER,
        target="as in Fig. 19",
    ),
    Benchmark(
        kinds=("block_size_sweep",),
        title="Block sizes on a GPU",
        question="What does the block size do to latency (Fig. 18b)?",
        command="python -m benchmarks.gpu.block_size_sweep --out DIR",
        measures=GPU_WORKER,
        target="as in Fig. 18b",
    ),
)


def benchmark_of(kind: str) -> Benchmark:
    """Raises ValueError for a kind that has no section."""
    for benchmark in BENCHMARKS:
        if kind in benchmark.kinds:
            return benchmark
    raise ValueError(f"no section shows results of the kind {kind!r}; describe it in {__name__}")
