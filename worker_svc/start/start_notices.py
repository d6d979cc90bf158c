"""Lines about a worker's own choices for its starter: dtype, memory, threads."""

from worker_svc.description import WorkerDescription
from worker_svc.memory.pool_plan import gib


def notices(description: WorkerDescription) -> dict[str, str]:
    """Lines for people, by topic."""
    lines = {}
    if description.dtype_reason:
        dtype, stored = description.model.dtype, description.weight_dtype
        weights = "" if stored == dtype else f", weights of the layers {stored}"
        lines["dtype"] = f"{dtype}{weights}: {description.dtype_reason}"
    memory, limits = description.memory, description.limits
    if memory is not None:
        parts = [f"weights {gib(memory.weight_bytes)}", f"KV pool {gib(memory.kv_pool_bytes)}"]
        if memory.host_pool_bytes:
            parts.append(f"swap pool {gib(memory.host_pool_bytes)}")
        parts.append(f"steps up to {gib(memory.step_bytes)}")
        num_longest = limits.num_blocks * limits.block_size // limits.max_model_len
        lines["takes"] = f"{', '.join(parts)}; the pool holds {num_longest} sequences of {limits.max_model_len} tokens"
    if description.num_threads is not None:
        kernels = description.kernels or "torch"
        ranks = f" in each of {description.num_ranks} ranks" if description.num_ranks > 1 else ""
        lines["threads"] = f"{description.num_threads}{ranks}, kernels: {kernels}"
    return lines
