"""Settings of the worker by flag, variable and file, and the address that it gives itself."""

import socket
from pathlib import Path

import pytest

from common.address import advertised_address
from quire import worker_settings
from quire.settings import parse, to_toml
from quire.worker_settings import WorkerSettings
from scheduler_svc.workers import description_check
from worker_svc.memory import pool_plan


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_CONFIG", raising=False)


def test_a_flag_comes_before_a_variable_and_a_variable_before_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "quire.toml"
    file.write_text('[worker]\nmodel = "file"\nblock_size = 8\nnum_blocks = 5\n[scheduler]\nlisten = "x:1"\n')
    monkeypatch.setenv("QUIRE_CONFIG", str(file))
    monkeypatch.setenv("QUIRE_WORKER_BLOCK_SIZE", "32")
    monkeypatch.setenv("QUIRE_WORKER_MODEL", "variable")
    settings = parse(WorkerSettings, ["--model", "flag"])
    assert (settings.model, settings.block_size, settings.num_blocks) == ("flag", 32, 5)


def test_printed_settings_are_settings_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = parse(WorkerSettings, ["--model", 'a "model"', "--kv-memory-fraction", "0.25", "--dtype", "bfloat16"])
    file = tmp_path / "quire.toml"
    file.write_text(to_toml(settings))
    monkeypatch.setenv("QUIRE_CONFIG", str(file))
    assert parse(WorkerSettings, []) == settings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--num-blocks", "4", "--kv-memory-fraction", "0.5"],
            "--num-blocks 4 and --kv-memory-fraction 0.5 each set the size of the KV pool",
        ),
        (["--num-blocks", "0"], "greater than or equal to 1"),
        (["--kv-memory-fraction", "1.5"], "less than or equal to 1"),
        (["--device", "tpu"], "--device: 'tpu' does not fit: device to compute on: cpu, cuda, cuda:N"),
        (["--dtype", "int4"], "Input should be 'auto'"),
        (["--kv-dtype", "int4"], "Input should be 'auto', 'fp8' or 'int8'"),
        (["--rank-timeout-s", "1"], "greater than or equal to 1.5"),
        (["--runner", "gpu"], "Input should be 'auto', 'cpu' or 'device'"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(WorkerSettings, ["--model", "m", *arguments])


def test_no_pool_has_more_blocks_than_the_scheduler_believes() -> None:
    assert pool_plan.MOST_BLOCKS == worker_settings.MOST_BLOCKS == description_check.MAX_BLOCKS
    for name in ("--num-blocks", "--num-host-blocks"):
        with pytest.raises(ValueError, match=f"^{name}: .* not '{worker_settings.MOST_BLOCKS + 1}'"):
            parse(WorkerSettings, ["--model", "m", f"{name}={worker_settings.MOST_BLOCKS + 1}"])


def test_graphs_are_on_unless_switched_off() -> None:
    assert parse(WorkerSettings, ["--model", "m"]).graphs
    assert not parse(WorkerSettings, ["--model", "m", "--no-graphs"]).graphs


@pytest.mark.parametrize(
    ("bound", "advertise", "address"),
    [
        ("127.0.0.1:7000", None, "127.0.0.1:7000"),
        ("0.0.0.0:7000", None, f"{socket.gethostname()}:7000"),
        ("[::]:7000", None, f"{socket.gethostname()}:7000"),
        ("0.0.0.0:7000", "worker-1", "worker-1:7000"),
        ("0.0.0.0:7000", "worker-1:9000", "worker-1:9000"),
        ("0.0.0.0:7000", "[fe80::1]", "[fe80::1]:7000"),
        ("0.0.0.0:7000", "[fe80::1]:9000", "[fe80::1]:9000"),
    ],
)
def test_the_advertised_address_is_the_bound_one_or_this_machines_or_the_given(
    bound: str, advertise: str | None, address: str
) -> None:
    assert advertised_address(bound, advertise) == address
