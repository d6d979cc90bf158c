"""Mishaps of a person with the commands: Ctrl-C while they load, output that nobody reads, closed streams."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient
from tests.quire.scripted_run import Script
from tests.quire.scripted_server import ScriptedServer
from tests.quire.test_cli import NOBODY, run
from tests.services import ROOT

SCRIPT = (sys.executable, "-c", "from quire.cli.__main__ import main; main()")  # as an entry point does
QUIRE = f"{sys.executable} -m quire.cli"
STUB = "import os, time; os.write(1, b'loading'); time.sleep(600)"


async def shell(line: str) -> tuple[int | None, str, str]:
    """Run a line of a shell; return its exit code, standard output and standard error."""
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", line, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await asyncio.wait_for(process.communicate(), patient(60))
    return process.returncode, output.decode(), errors.decode()


@pytest.mark.parametrize("slow_module", ["grpc", "typer"])  # of the package, and of the commands
def test_ctrl_c_while_the_command_loads_ends_it_without_a_word(slow_module: str, tmp_path: Path) -> None:
    (tmp_path / f"{slow_module}.py").write_text(STUB)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [*SCRIPT, "generate", "hello"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(7) == b"loading"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=patient(20))
        finally:
            process.kill()
    assert (process.returncode in (130, -signal.SIGINT), errors.strip()) == (True, b"")


async def test_a_loaded_command_ends_by_ctrl_c_with_its_own_exit_code(server: ScriptedServer) -> None:
    command = await asyncio.create_subprocess_exec(
        *(*SCRIPT, "top", "-a", server.address, "--interval-s", "0.1"),
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    await server.until(lambda: server.num_looks >= 2)
    command.send_signal(signal.SIGINT)
    _, errors = await asyncio.wait_for(command.communicate(), patient(20))
    assert (command.returncode, errors) == (130, b"")


@pytest.mark.parametrize("in_a_call", [False, True])
async def test_a_server_that_breaks_off_its_connections_is_no_remark_of_grpc(
    server: ScriptedServer, in_a_call: bool
) -> None:
    command = await asyncio.create_subprocess_exec(
        *(*SCRIPT, "top", "-a", server.address, "--interval-s", "0.1"),
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert command.stdout is not None
    assert await asyncio.wait_for(command.stdout.readline(), patient(30))  # without a first frame it would end
    if in_a_call:
        server.may_answer.clear()
        num_looks = server.num_looks
        await server.until(lambda: server.num_looks > num_looks)
    await server.stop()
    async with asyncio.timeout(patient(30)):
        while b"answer" not in (line := await command.stdout.readline()):
            assert line
    command.send_signal(signal.SIGINT)
    _, errors = await asyncio.wait_for(command.communicate(), patient(20))
    assert b"chttp2" not in errors


WRITERS = ["health", "top --once", "requests", "workers", "prefix list", "generate hello", "generate --json hello"]


@pytest.mark.parametrize("command", WRITERS)
async def test_output_that_cannot_be_written_is_one_line(server: ScriptedServer, command: str) -> None:
    code, _, errors = await shell(f"{QUIRE} {command} -a {server.address} > /dev/full")
    assert (code, errors) == (1, "quire: the output could not be written: No space left on device\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", "2> /dev/full"])
async def test_a_closed_standard_stream_is_no_traceback(server: ScriptedServer, closed: str) -> None:
    for command in (f"generate - --stats -a {server.address}", f"chat -a {server.address}"):
        _, output, errors = await shell(
            f"{QUIRE} {command} {closed} < /dev/null" if "<" not in closed else f"{QUIRE} {command} {closed}"
        )
        assert "Traceback" not in output + errors and "Exception" not in output + errors


@pytest.mark.parametrize("command", ["generate -", "prefix pin name -", "chat"])
@pytest.mark.parametrize("handler", ["strict", "surrogateescape"])  # by the locale
async def test_input_that_is_no_utf_8_is_refused_as_such(server: ScriptedServer, command: str, handler: str) -> None:
    line = rf"printf 'caf\xe9' | PYTHONIOENCODING=utf-8:{handler} {QUIRE} {command} -a {server.address}"
    _, output, errors = await shell(line)
    assert "has characters that UTF-8 cannot encode" in errors and "Traceback" not in output + errors


async def test_text_that_the_locale_does_not_have_is_replaced_and_json_keeps_it(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=2, before=" é")
    command = f"PYTHONIOENCODING=ascii {QUIRE} generate hello -a {server.address}"
    assert await shell(command) == (0, " ?0 ?1\n", "")
    code, output, _ = await shell(f"{command} --json")
    assert (code, json.loads(output)["text"]) == (0, " é0 é1")


async def test_top_writes_frame_after_frame_into_a_pipe_and_ends_with_its_reader(server: ScriptedServer) -> None:
    top = f"{QUIRE} top -a {server.address} --interval-s 0.1"
    _, output, errors = await shell(f"{top} | grep --line-buffered -m 3 'quire at'")
    assert (output.count("quire at"), errors) == (3, "")


async def test_health_takes_its_address_as_every_command_does(server: ScriptedServer) -> None:
    for arguments in (["-a", server.address], ["--address", server.address], [server.address]):
        assert (await run("health", *arguments)).stdout == "quire.v1.Inference: SERVING\n"
    both = await run("health", NOBODY, "-a", server.address)
    assert (both.exit_code, "give it only once" in both.stderr) == (2, True)


async def test_health_refuses_a_wait_of_no_time() -> None:
    for wait in ("0", "-3"):
        code, _, errors = await shell(f"{QUIRE} health -a {NOBODY} --timeout-s {wait}")
        assert (code, "--timeout-s" in errors) == (2, True)


@pytest.mark.parametrize("command", ["", "prefix"])
async def test_a_group_without_a_command_shows_its_help_and_no_empty_error(command: str) -> None:
    code, output, errors = await shell(f"{QUIRE} {command}")
    assert (code, "Commands" in output, errors) == (2, True, "")


async def test_what_is_not_there_is_told_with_the_command_that_lists_what_is(server: ScriptedServer) -> None:
    unpinned = await run("prefix", "unpin", "nope", "-a", server.address)
    assert "nope" in unpinned.stderr and "quire prefix list" in unpinned.stderr
    drained = await run("workers", "drain", "w7", "-a", server.address)
    assert "w7" in drained.stderr and "`quire workers` lists" in drained.stderr


async def test_a_host_that_no_name_server_knows_is_told_in_plain_words() -> None:
    code, _, errors = await shell(f"{QUIRE} health -a nosuch.invalid:1 --timeout-s 20")
    assert code == 1
    assert errors.startswith("quire: no Quire server answers at nosuch.invalid:1 (")
    assert "[field" not in errors and errors.count("nosuch.invalid") == 1
