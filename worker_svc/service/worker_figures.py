"""Figures of a worker process for its own `/metrics`: its model and memory, its steps, and the process.

Blocks by state are the scheduler's to say: a worker does not know who holds which.
"""

from collections.abc import Iterator

from prometheus_client.core import Metric

from common.metric_families import Labels, counters, gauges, histogram, process_families
from common.running_histogram import RunningHistogram, decades
from common.step import StepResult, StepStatus
from worker_svc.description import MemoryUse, WorkerDescription
from worker_svc.steps.step_runner import PassCountingRunner

_STEP_S = decades((1, 2.5, 5), -5, 1)


class WorkerFigures:
    """One per process. Every method runs on the event loop's thread."""

    def __init__(self) -> None:
        self.description: WorkerDescription | None = None  # None while the model is being loaded
        self.passes: PassCountingRunner | None = None  # None also if the runner counts none
        self._num_steps = dict.fromkeys(StepStatus, 0)
        self._exec_s = RunningHistogram(_STEP_S)
        self._queue_s = RunningHistogram(_STEP_S)

    def record_step(self, result: StepResult) -> None:
        """Record the answer to a step."""
        self._num_steps[result.status] += 1
        if result.status is StepStatus.OK:
            self._exec_s.observe(result.exec_ns / 1e9)
            self._queue_s.observe(result.queue_ns / 1e9)

    def read(self) -> list[Metric]:
        """Return all families as they are now."""
        return list(self._families())

    def _families(self) -> Iterator[Metric]:
        by_status = [({"status": status.name.lower()}, number) for status, number in self._num_steps.items()]
        yield counters("quire_worker_steps", "Steps answered, by status.", by_status)
        yield histogram("quire_worker_step_seconds", "Seconds that executed steps took.", {}, self._exec_s)
        about = "Seconds that executed steps waited for the one before them."
        yield histogram("quire_worker_step_queue_seconds", about, {}, self._queue_s)
        if self.passes is not None:
            yield from _pass_families(self.passes)
        yield gauges("quire_worker_ready", "1 once the model is loaded.", [({}, self.description is not None)])
        if self.description is not None:
            yield from _description_families(self.description)
        yield from process_families({})


def _pass_families(runner: PassCountingRunner) -> Iterator[Metric]:
    by_graph = [({"kind": kind}, number) for kind, number in runner.graph_passes.items()]
    yield counters("quire_worker_graph_passes", "Passes launched as one CUDA graph, by kind.", by_graph)
    by_kernels = [({"reason": reason}, number) for reason, number in runner.kernel_passes.items()]
    about = "Passes launched kernel by kernel, by the reason for which there was no graph."
    yield counters("quire_worker_kernel_passes", about, by_kernels)


def _description_families(description: WorkerDescription) -> Iterator[Metric]:
    labels = {
        "model_name": description.model.name,
        "device": description.device,
        "dtype": description.model.dtype,
        "weight_dtype": description.weight_dtype,
        "kv_dtype": description.kv_dtype,
        "block_size": str(description.limits.block_size),
        "num_blocks": str(description.limits.num_blocks),
        "num_host_blocks": str(description.limits.num_host_blocks),
    }
    yield gauges("quire_worker_info", "The model, its device and its KV memory.", [(labels, 1)])
    startup = [({"phase": each.phase}, each.duration_ms / 1e3) for each in description.startup]
    yield gauges("quire_worker_start_seconds", "Seconds that each phase of the start took.", startup)
    if description.memory is not None:
        by_use = _memory(description.memory)
        yield gauges("quire_worker_memory_bytes", "Memory by use; of a pool, its size.", by_use)


def _memory(memory: MemoryUse) -> list[tuple[Labels, float]]:
    uses = {
        "weights": memory.weight_bytes,
        "kv_pool": memory.kv_pool_bytes,
        "host_pool": memory.host_pool_bytes,
        "steps": memory.step_bytes,
        "fetches": memory.fetch_bytes,
    }
    return [({"use": use}, num_bytes) for use, num_bytes in uses.items()]
