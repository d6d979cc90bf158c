"""Worker processes on the GPU, many at once: each loads a model for seconds, and none needs the others to be done."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.services import Service, start_scheduler, start_worker

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET = ("--max-batched-tokens", "48")  # prompts are computed in chunks, beside decoding
# The worker's share: as many seats as the requests of a test, so that few graphs are captured.
SEATS = ("--max-num-seqs", "8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A model and how a worker serves it."""

    model: Path
    worker_flags: tuple[str, ...]
    scheduler_flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Served:
    """A scheduler and its worker, perhaps still loading."""

    scheduler: Service
    worker: Service

    def ready_address(self) -> str:
        """Waits until it can generate; a worker that refuses to start is shown at once."""
        self.worker.wait_for("ready")
        self.scheduler.wait_for("worker ready")
        return str(self.scheduler.wait_for("listening")["address"])


@contextmanager
def all_serving(variants: Mapping[str, Variant]) -> Iterator[dict[str, Served]]:
    """Workers by name, started side by side."""
    with ExitStack() as stack:
        served = {}
        for name, variant in variants.items():
            scheduler, address = start_scheduler(*BUDGET, *SEATS, *variant.scheduler_flags)
            stack.enter_context(scheduler)
            flags = ("--device", DEVICE, "--runner", "device", "--threads", "1", *SEATS, *variant.worker_flags)
            worker = stack.enter_context(start_worker(address, *flags, model=variant.model))
            served[name] = Served(scheduler, worker)
        yield served
