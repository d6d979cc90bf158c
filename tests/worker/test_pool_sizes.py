"""Advice for a pool that holds less than one sequence names options that the runner has."""

from typing import Any

import pytest
import structlog
import torch

from quire.worker_settings import WorkerSettings
from worker_svc.model.decoder import Decoder
from worker_svc.start.pool_sizes import PoolRoom, fewer_bytes, plan_in_room

FEW_BLOCKS = 2


def advice(decoder: Decoder, **options: Any) -> str:
    """Return the warning of a pool of a few blocks."""
    settings = WorkerSettings(model="any", **options)
    shape = decoder.block_shape(settings.block_size)
    with structlog.testing.capture_logs() as logs:
        plan_in_room(settings, decoder, shape, PoolRoom(FEW_BLOCKS * shape.bytes_per_block, 1.0))
    (line,) = logs
    return str(line["event"])


def test_a_cpu_keeps_keys_and_values_in_int8(decoder: Decoder) -> None:
    assert "give --kv-memory-bytes, --kv-dtype int8 or a smaller" in advice(decoder)


@pytest.mark.parametrize("options", [{"kernels": "torch"}, {"dtype": "float16"}], ids=str)
def test_a_cpu_that_would_refuse_int8_is_not_advised_to_take_it(decoder: Decoder, options: dict[str, str]) -> None:
    assert "give --kv-memory-bytes, or a smaller" in advice(decoder, **options)


def test_the_runner_of_accelerators_keeps_them_in_fp8_and_has_no_int8(decoder: Decoder) -> None:
    said = advice(decoder, runner="device")
    assert "give --kv-memory-bytes, --kv-dtype fp8 or a smaller" in said and "int8" not in said


@pytest.mark.parametrize(("capability", "said"), [((8, 6), "or "), ((8, 9), "--kv-dtype fp8 or ")])
def test_a_gpu_keeps_them_in_fp8_if_it_has_e4m3(
    capability: tuple[int, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert fewer_bytes(WorkerSettings(model="any"), torch.device("cuda:0")) == said


def test_fewer_bytes_that_were_asked_for_are_not_advised(decoder: Decoder) -> None:
    assert "give --kv-memory-bytes, or a smaller" in advice(decoder, kv_dtype="int8")
