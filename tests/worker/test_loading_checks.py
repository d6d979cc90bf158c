"""Checks of a model that the start repeats once it knows the device, or has downloaded the files."""

from pathlib import Path

import pytest
import torch

from quire import machine
from quire.worker_settings import WorkerSettings
from tests.worker.forked_ranks import fork_rank
from tests.worker.tiny_models import write_tiny_model
from worker_svc.option_check import OptionError
from worker_svc.start import loading
from worker_svc.start.loading import load_model


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes")
def test_weights_are_checked_where_a_driver_is_installed_and_a_cpu_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: only torch could tell the device, and nobody looked again: the system killed the worker."""
    folder = write_tiny_model("llama_gqa", tmp_path)
    monkeypatch.setattr(loading, "has_cuda_driver", lambda: True)
    monkeypatch.setattr(machine, "total_memory_bytes", lambda: 1)
    with pytest.raises(OptionError, match=r"the weights need .* of main memory"):
        load_model(WorkerSettings(model=str(folder)))


def test_a_model_that_was_downloaded_is_checked_by_the_options_of_the_whole_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: --kv-memory-bytes had been divided among the ranks already, and counted as too little."""
    folder = write_tiny_model("llama_gqa", tmp_path)
    monkeypatch.setattr(loading, "is_local", lambda name: False)
    settings = WorkerSettings(
        model=str(folder),
        device="cpu",
        dtype="float32",
        threads=2,
        max_num_seqs=2,
        max_model_len=64,
        kv_memory_bytes=64 * 768,  # just one sequence: 3 layers of 2 x 2 heads of 16 numbers
        tensor_parallel=2,
    )
    model = load_model(settings, start_rank=fork_rank)
    try:
        limits = model.description.limits
        assert limits.num_blocks * limits.block_size >= limits.max_model_len == 64
    finally:
        model.close()
