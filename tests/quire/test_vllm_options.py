"""Options of `vllm serve` at `quire serve`: refused with what to give instead, which exists."""

import re
import subprocess
import sys

import pytest
import typer

from quire.cli.app import app
from quire.cli.vllm_options import INSTEAD, instead_of
from quire.gateway_settings import GatewaySettings
from quire.scheduler_settings import SchedulerSettings
from quire.typed_names import flag_of
from quire.worker_settings import WorkerSettings

FLAG = re.compile(r"--[a-z][a-z-]+")


def flags() -> set[str]:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_every_flag_that_is_named_instead_is_one_of_quire_serve(name: str) -> None:
    assert flag_of(name) not in flags(), "it is an option itself"
    named = set(FLAG.findall(INSTEAD[name]))
    assert named <= flags()
    assert named or "leave it out" in INSTEAD[name] or len(INSTEAD[name]) > 20


def test_an_option_whose_name_begins_with_one_of_ours_is_answered_with_ours() -> None:
    ours = {*WorkerSettings.model_fields, *SchedulerSettings.model_fields, *GatewaySettings.model_fields}
    for name in INSTEAD:
        begun = [each for each in ours if name.startswith(f"{each}_")]
        assert all(flag_of(each) in INSTEAD[name] for each in begun), name


def test_an_option_of_the_same_name_is_taken_as_it_is() -> None:
    taken = {"dtype", "max_model_len", "max_num_seqs", "block_size", "generation_config", "reasoning_parser", "device"}
    assert taken <= {*WorkerSettings.model_fields, *SchedulerSettings.model_fields, *GatewaySettings.model_fields}
    assert all(instead_of(flag_of(each)) is None for each in taken)


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (["--tensor-parallel-size", "2"], "--tensor-parallel"),
        (["--tensor_parallel_size=2"], "--tensor-parallel"),
        (["-tp", "2"], "--tensor-parallel"),
        (["--gpu-memory-utilization", "0.9"], "--kv-memory-fraction"),
        (["--served-model-name", "x"], "--model-name"),
        (["--port", "8000"], "--http HOST:PORT"),
        (["--api-key", "secret"], "QUIRE_API_KEY"),
        (["--enforce-eager"], "--no-graphs"),
        (["--trust-remote-code"], "leave it out"),
    ],
)
def test_an_option_of_vllm_is_one_line_that_says_what_to_give(arguments: list[str], instead: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quire.cli", "serve", "m", *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert instead in line and "secret" not in line


def test_other_commands_and_unknown_options_are_refused_as_before() -> None:
    for arguments in (["serve", "m", "--nonsense"], ["generate", "x", "--port", "1"]):
        done = subprocess.run(
            [sys.executable, "-m", "quire.cli", *arguments], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2 and "No such option" in done.stderr
