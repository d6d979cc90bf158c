"""Refuses a model whose weights a CUDA device does not hold, with what to do instead."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from worker_svc.gpu.start import refuse_short_memory
from worker_svc.memory.kv_pool import free_memory_bytes
from worker_svc.memory.pool_plan import gib


@contextmanager
def refuse_large_weights(device: torch.device) -> Iterator[None]:
    """Raises PoolSizeError if the device's memory ends while weights are loaded. On a CPU the system decides."""
    if device.type != "cuda":
        yield
        return
    with refuse_short_memory(
        f"with {gib(free_memory_bytes(device))} free on {device}",
        "the model's weights",
        "give --weight-dtype int4 or fp8, --tensor-parallel over more GPUs, or a smaller model",
    ):
        yield
