"""Main memory for a worker's pool: beside others, within its share, with nearly nothing free."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.native.native_kernels import native_kernels
from quire.worker_settings import WorkerSettings
from tests.worker.runners import limits_for
from tests.worker.tiny_models import TINY_MODELS, write_tiny_model
from worker_svc.cpu.host_decoder import HostDecoder
from worker_svc.cpu.runner import CpuRunner
from worker_svc.cpu.start import choose_packing
from worker_svc.cpu.step_memory import step_buffer_bytes
from worker_svc.memory.kv_pool import KVPool
from worker_svc.memory.main_memory import MainMemory
from worker_svc.memory.pool_plan import PoolSizeError
from worker_svc.model.decoder import load_decoder
from worker_svc.start import runner_start
from worker_svc.start.loading import load_model
from worker_svc.steps.trial_steps import largest_step

GIB = 1 << 30


def memory(*, free: int, taken: int = 0, share: int | None = None, is_limited: bool = False) -> MainMemory:
    return MainMemory(free=free, taken=taken, share=share, is_limited=is_limited)


def test_alone_in_a_container_nine_tenths_of_what_is_free_are_for_the_pool_and_half_of_it_elsewhere() -> None:
    assert memory(free=10 * GIB, is_limited=True).fraction == 0.9
    assert memory(free=10 * GIB).fraction == 0.5
    assert memory(free=10 * GIB, share=5 * GIB).fraction == 0.9


def test_workers_of_one_machine_get_equal_pools_whoever_has_loaded_first() -> None:
    # 24 GiB for three, each with 2 GiB of weights: 6 GiB are left of each share, however much is free when it looks.
    for num_loaded in (1, 2, 3):
        assert memory(free=(24 - 2 * num_loaded) * GIB, taken=2 * GIB, share=8 * GIB).available == 6 * GIB


def test_a_share_is_no_promise_of_memory_that_somebody_else_has_taken() -> None:
    assert memory(free=1 * GIB, taken=2 * GIB, share=8 * GIB).available == 1 * GIB
    assert memory(free=9 * GIB, taken=10 * GIB, share=8 * GIB).available == 0


def test_a_step_is_kept_free_unless_it_would_leave_nearly_nothing() -> None:
    assert memory(free=10 * GIB).for_pool(3 * GIB) == 7 * GIB
    assert memory(free=4 * GIB).for_pool(30 * GIB) == 1 * GIB


def test_a_pool_that_the_system_refuses_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: under `ulimit -v`, or without overcommitment, a worker ended with a traceback."""
    folder, make_pool = write_tiny_model("llama_gqa", tmp_path), runner_start._make_pool

    def make_under_limit(*arguments: Any) -> KVPool:
        limits = resource.getrlimit(resource.RLIMIT_AS)
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (32 << 20), limits[1]))
        try:
            return make_pool(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)

    monkeypatch.setattr(runner_start, "_make_pool", make_under_limit)
    with pytest.raises(PoolSizeError, match=r"does not hold what steps and the KV pool take: .* --kv-memory-bytes"):
        load_model(WorkerSettings(model=str(folder), device="cpu", kv_memory_bytes=256 << 20, max_num_seqs=2))


@pytest.mark.parametrize("family", TINY_MODELS)
def test_the_largest_step_takes_no_more_than_is_kept_free_for_it(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_tiny_model(family, tmp_path_factory.mktemp(family))
    packing = choose_packing(torch.float32, has_native=True)
    decoder = load_decoder(folder, torch.float32, torch.device("cpu"), packing.make_product)
    model = HostDecoder(decoder, native_kernels())
    limits = limits_for(decoder)
    pool = KVPool(decoder.block_shape(limits.block_size), limits.num_blocks, decoder.device)
    CpuRunner(model, pool, limits).launch(largest_step(limits))
    kept_free = step_buffer_bytes(
        decoder.config, decoder.dtype, num_tokens=limits.max_batched_tokens, num_rows=limits.num_seats
    )
    buffers = [*model._buffers._buffers.values(), *model._logits._buffers.values()]
    assert 0.4 * kept_free < sum(buffer.nbytes for buffer in buffers) <= kept_free
