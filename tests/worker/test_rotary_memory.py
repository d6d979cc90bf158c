"""The table of rotary angles is as long as sequences may be, and planning of the KV pool knows its memory."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from quire import machine
from quire.worker_settings import WorkerSettings
from worker_svc.cpu.host_decoder import HostDecoder
from worker_svc.cpu.runner import CpuRunner
from worker_svc.memory.pool_plan import PoolSizeError
from worker_svc.start import runner_start
from worker_svc.start.loading import load_model

NUM_POSITIONS = 1 << 19
TABLE_BYTES = NUM_POSITIONS * 64 * 4


@pytest.fixture(scope="module")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of a long context."""
    folder = tmp_path_factory.mktemp("long")
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=NUM_POSITIONS,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def bytes_when_planned(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[HostDecoder, int]:
    """The decoder of a worker that has started, and by how much its process had grown when it planned its pool."""
    plan, seen = runner_start.plan_cpu_pool, []

    def observed(*arguments: Any) -> Any:
        seen.append(machine.own_memory_bytes())
        return plan(*arguments)

    monkeypatch.setattr(runner_start, "plan_cpu_pool", observed)
    before = machine.own_memory_bytes()
    loaded = load_model(WorkerSettings(model=str(folder), device="cpu", num_blocks=64, max_num_seqs=2, **settings))
    assert isinstance(loaded.runner, CpuRunner)
    model = loaded.runner._model
    assert isinstance(model, HostDecoder)
    return model, seen[0] - before


def test_a_table_is_no_longer_than_sequences_may_be(long_context: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, grown = bytes_when_planned(long_context, monkeypatch, max_model_len=256)
    assert model._rotary is not None
    assert model._rotary.shape == (256, 64)
    assert grown < TABLE_BYTES


def test_the_table_is_there_when_the_pool_is_planned(long_context: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, grown = bytes_when_planned(long_context, monkeypatch)
    assert model._rotary is not None
    assert model._rotary.nbytes == TABLE_BYTES
    assert grown > 0.9 * TABLE_BYTES


def test_a_table_beyond_the_free_memory_is_refused(long_context: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_start, "free_memory_bytes", lambda device: TABLE_BYTES - 1)
    with pytest.raises(PoolSizeError, match=r"rotary angles of 524288 positions need .* a smaller --max-model-len"):
        load_model(WorkerSettings(model=str(long_context), device="cpu", num_blocks=64, max_num_seqs=2))
