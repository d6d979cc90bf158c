"""Figures of a worker for its scrapes: passes by how they were launched, from a real runner."""

from pathlib import Path

import pytest
import torch

from tests.worker.device.sample_steps import decode_steps
from tests.worker.runners import limits_for, poisoned_pool
from tests.worker.tiny_models import write_tiny_model
from worker_svc.gpu.graphs import graph_sizes
from worker_svc.gpu.runner import DeviceRunner
from worker_svc.gpu.torch_operations import OPERATIONS
from worker_svc.model.decoder import load_decoder
from worker_svc.service.worker_figures import WorkerFigures
from worker_svc.steps.step_runner import PassCountingRunner


@pytest.fixture
def runner(tmp_path: Path) -> DeviceRunner:
    decoder = load_decoder(write_tiny_model("llama_gqa", tmp_path), torch.float32, torch.device("cpu"))
    limits = limits_for(decoder)
    return DeviceRunner(decoder, poisoned_pool(decoder), limits, OPERATIONS, graph_sizes(limits.num_seats))


def samples(figures: WorkerFigures, label: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels[label]): sample.value
        for family in figures.read()
        for sample in family.samples
        if label in sample.labels
    }


def test_passes_are_shown_by_reason_and_kind(runner: DeviceRunner) -> None:
    figures = WorkerFigures()
    assert not samples(figures, "reason")
    assert isinstance(runner, PassCountingRunner)
    figures.passes = runner
    for step in decode_steps(4):
        runner.launch(step).wait()
    assert samples(figures, "reason") == {
        ("quire_worker_kernel_passes_total", "no_graphs"): 5,
        ("quire_worker_kernel_passes_total", "too_many_tokens"): 0,
        ("quire_worker_kernel_passes_total", "many_short_chunks"): 0,
    }
    kinds = {kind for _, kind in samples(figures, "kind")}
    assert kinds == {"decode", "shared_prefix", "mixed"}
