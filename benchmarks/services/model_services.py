"""A model behind the real services, for benchmarks of the whole: store, scheduler and one worker, each a process.

Knows flags and readiness; what is asked of the model is the caller's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.services.processes import embedded_valkey, started

SMOKE_TEST = "a smoke test: the figures mean nothing"
WORKER_START_S = 150.0  # without a line in its log: gigabytes of weights, kernels to compile, graphs to capture


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Deployment of a model. Limits are the worker's and the scheduler's at once."""

    model: Path
    device: str
    dtype: str
    max_num_seqs: int = 256
    max_batched_tokens: int | None = 8192  # None: as many as the worker takes by itself
    pipeline_depth: int = 2
    prefix_cache: bool = True
    worker_flags: tuple[str, ...] = ()
    trace: Path | None = None  # the scheduler writes the moments of its steps here


@dataclass(frozen=True, slots=True)
class Site:
    """Services that are ready."""

    address: str
    worker: dict[str, Any]  # what it said of itself: pool, device, phases of its start in milliseconds


@contextmanager
def serving(deployment: Deployment) -> Iterator[Site]:
    """Serve a model; stop everything after the block and write the traces. Raises ProcessError."""
    limits = ["--max-num-seqs", str(deployment.max_num_seqs)]
    if deployment.max_batched_tokens is not None:
        limits += ["--max-batched-tokens", str(deployment.max_batched_tokens)]
    with embedded_valkey(None) as store:
        flags = ["--listen", "127.0.0.1:0", "--store", store, "--pipeline-depth", str(deployment.pipeline_depth)]
        flags += [] if deployment.prefix_cache else ["--no-prefix-cache"]
        module, own = "scheduler_svc", []
        if deployment.trace is not None:
            module, own = "benchmarks.services.traced_scheduler", [str(deployment.trace), "--"]
        with started(module, *own, *flags, *limits) as scheduler:
            address = str(scheduler.wait_for("listening")["address"])
            flags = ["--scheduler", address, "--model", str(deployment.model), "--device", deployment.device]
            flags += ["--dtype", deployment.dtype, *limits, *deployment.worker_flags]
            with started("worker_svc", *flags) as worker:
                description = worker.wait_for("ready", WORKER_START_S)
                scheduler.wait_for("worker ready")
                yield Site(address, description)
                worker.end()
            scheduler.end()
