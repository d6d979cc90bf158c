"""Mistyped commands: one line each, which says in a person's words what to type."""

import sys

import pytest

from tests.quire.test_cli import run
from tests.quire.test_mishaps import QUIRE, shell
from tests.services import DEMO_MODEL

QUOTES = "; put a text of several words in quotes"
LINES = {
    "generate Once upon a time": "Got unexpected extra argument(s) (upon a time)" + QUOTES,
    "prefix pin name You are": "Got unexpected extra argument(s) (are)" + QUOTES,
    "workers drain a b": "Got unexpected extra argument(s) (b)",
    "serv MODEL": "No such command 'serv'. Did you mean 'serve'?",
    "workers list": "No such command 'list'. `quire workers --help` lists the commands",
    "help": "`quire --help` lists the commands",
    "shards list": "Invalid value for 'N': give a whole number",
    "generate x --temperature warm": "Invalid value for '--temperature' / '-t': give a number",
    "generate x --regex a --json-object": "Invalid value: --json-object and --regex cannot go together: give one "
    "of them",
    "generate x --lark nofile": "Invalid value for --lark: nofile cannot be read: No such file or directory",
    "serve MODEL --memory-bytes 1G": "--memory-bytes: give a whole number, not '1G'",
    "serve MODEL --keepalive-time-s soon": "--keepalive-time-s: give a number, not 'soon'",
    "serve MODEL --api-key-file /none": "--api-key-file: the file of API keys /none cannot be read: No such file or "
    "directory",
}


@pytest.mark.parametrize(("command", "message"), LINES.items())
async def test_a_mistyped_command_is_told_what_to_type(command: str, message: str) -> None:
    code, output, errors = await shell(f"{QUIRE} {command}")
    assert (code, output, errors.replace("python -m quire.cli", "quire")) == (2, "", f"quire: {message}\n")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("QUIRE_ADRESS", "QUIRE_ADDRESS"), ("QUIRE_API_KEYS", "QUIRE_API_KEY"), ("QUIRE_TLS_ROOTS", "QUIRE_TLS_ROOT")],
)
async def test_a_mistyped_variable_is_told_what_it_may_mean_by_any_command(given: str, meant: str) -> None:
    message = f"quire: {given} is not a setting of Quire; did you mean {meant}?\n"
    for command in ("requests", f"serve {DEMO_MODEL} --print-config"):
        assert await shell(f"{given}=x {QUIRE} {command}") == (2, "", message)


async def test_variables_of_other_programs_are_left_alone() -> None:
    code, output, _ = await shell(f"QUIRE_THEATRE=x QUIRE_WORKER_DTYPE=float32 {QUIRE} workers --help")
    assert code == 0 and "Usage:" in output


@pytest.mark.parametrize("command", ["", "generate", "prefix pin"])
async def test_a_short_flag_shows_the_help(command: str) -> None:
    short, long = [await run(*command.split(), flag) for flag in ("-h", "--help")]
    assert short.exit_code == 0 and short.stdout == long.stdout and "Usage:" in short.stdout


@pytest.mark.parametrize("service", ["scheduler_svc", "worker_svc", "gateway_svc"])
async def test_the_help_of_a_service_names_its_command(service: str) -> None:
    code, output, _ = await shell(f"{sys.executable} -m {service} --help")
    assert code == 0 and output.startswith(f"usage: python -m {service} [-h]")
