"""The commands that talk to a server, run as a user runs them, against the scripted one."""

import asyncio
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import quire
from quire.cli.app import app
from quire.cli.bench_command import run_load
from quire.cli.load import PlannedRequest
from quire.cli.top_view import block_bar, view
from quire.stats import BlockStats, JournalStats, Stats
from quire.v1 import inference_pb2 as pb
from tests.patience import patient
from tests.quire.scripted_run import Script
from tests.quire.scripted_server import ScriptedServer

NOBODY = "127.0.0.1:1"


async def run(*arguments: str, stdin: str | None = None) -> Any:
    """Runs a command; the server answers meanwhile."""
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments), input=stdin)


async def test_generate_prints_the_text_alone(server: ScriptedServer) -> None:
    result = await run("generate", "hello", "-a", server.address, "-n", "5", "-t", "0", "--stop", "x", "--stop", "y")
    assert (result.exit_code, result.stdout) == (0, " 0 1 2 3 4 5 6 7\n")
    sent = next(iter(server.runs.values())).request
    assert sent.text == "hello"
    assert (sent.stopping.max_tokens, list(sent.stopping.stop)) == (5, ["x", "y"])
    assert sent.sampling.HasField("temperature")  # 0 is a value
    assert not sent.sampling.HasField("top_p")


async def test_generate_reads_standard_input_and_tells_how_it_went(server: ScriptedServer) -> None:
    result = await run("generate", "-", "-a", server.address, "--stats", stdin="from a pipe")
    assert next(iter(server.runs.values())).request.text == "from a pipe"
    assert "3 + 8 tokens, stop, first token after 2 ms" in result.stderr


async def test_generate_gives_the_completion_as_json(server: ScriptedServer) -> None:
    result = await run("generate", "hello", "-a", server.address, "--json")
    completion = json.loads(result.stdout)
    assert completion["text"] == " 0 1 2 3 4 5 6 7"
    assert (completion["finish_reason"], completion["stop_cause"]["stop_string"]) == ("stop", "!")


async def test_generate_asks_for_samples_and_prints_each_under_a_heading(server: ScriptedServer) -> None:
    flags = ["--n", "2", "--best-of", "2", "--priority", "3", "--tenant", "acme", "--cache-salt", "pepper"]
    flags += ["--session-key", "mine"]
    result = await run("generate", "hello", "-a", server.address, "--stats", *flags)
    assert result.stdout.splitlines() == [
        "--- sample 0, stop",
        " 0 1 2 3 4 5 6 7",
        "--- sample 1, stop",
        " 1000 1001 1002 1003 1004 1005 1006 1007",
    ]
    assert "3 + 16 tokens, 2 samples, first token" in result.stderr
    assert "40.0% of its blocks saved by sharing" in result.stderr
    sent = next(iter(server.runs.values())).request
    assert (sent.sampling.n, sent.sampling.best_of, sent.priority) == (2, 2, 3)
    assert (sent.tenant, sent.cache_salt) == ("acme", "pepper")


async def test_generate_prints_a_sample_when_it_ends(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=4, released=1)
    command = await start("generate", "hello", "-a", server.address, "--n", "2")
    assert command.stdout is not None
    await server.until(lambda: len(server.runs) == 1)
    request_id = next(iter(server.runs))
    server.release(request_id, index=1)
    async with asyncio.timeout(patient(20)):
        assert await command.stdout.readline() == b"--- sample 1, stop\n"
        assert await command.stdout.readline() == b" 1000 1001 1002 1003\n"
        server.release(request_id)
        assert await command.stdout.read() == b"--- sample 0, stop\n 0 1 2 3\n"
        assert await command.wait() == 0


async def test_generate_searches_with_beams_and_tells_their_scores(server: ScriptedServer) -> None:
    flags = ("--beam-width", "4", "--n", "2", "--length-penalty", "0", "--early-stopping", "never")
    result = await run("generate", "hello", "-a", server.address, *flags)
    assert [line for line in result.stdout.splitlines() if line.startswith("---")] == [
        "--- sample 0, score -0.5000, length",
        "--- sample 1, score -1.5000, length",
    ]
    beam = next(iter(server.runs.values())).request.beam
    assert beam == pb.BeamParams(beam_width=4, length_penalty=0.0, early_stopping=pb.EARLY_STOPPING_NEVER)


async def test_the_one_output_of_a_beam_search_is_printed_alone(server: ScriptedServer) -> None:
    result = await run("generate", "hello", "-a", server.address, "--beam-width", "4")
    assert result.stdout == " 0 1 2 3 4 5 6 7\n"


async def test_json_has_the_first_sample_on_top_and_all_below(server: ScriptedServer) -> None:
    result = await run("generate", "hello", "-a", server.address, "--json", "--beam-width", "4", "--n", "2")
    completion = json.loads(result.stdout)
    assert completion["text"] == completion["samples"][0]["text"] == " 0 1 2 3 4 5 6 7"
    assert [each["score"] for each in completion["samples"]] == [-0.5, -1.5]
    assert completion["memory"]["saved_blocks"] == 4


def test_half_a_beam_search_is_asked_wrongly() -> None:
    result = CliRunner().invoke(app, ["generate", "hi", "-a", NOBODY, "--length-penalty", "2"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "give --beam-width as well" in result.stderr


def test_logprobs_without_json_would_not_be_seen() -> None:
    result = CliRunner().invoke(app, ["generate", "hi", "-a", NOBODY, "--logprobs", "2"])
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)


def test_the_version_is_told() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("quire ")


async def test_a_refusal_is_one_line_and_says_what_to_change(server: ScriptedServer) -> None:
    violation = quire.FieldViolation("sampling.top_p", "must be above 0 and at most 1")
    server.default = Script(refusals=[quire.InvalidRequestError.of([violation])])
    result = await run("generate", "hello", "-a", server.address, "--top-p", "7")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "quire: --top-p: must be above 0 and at most 1\n"


async def test_a_request_that_fails_is_one_line_after_its_output(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=2, state=pb.REQUEST_STATE_FAILED, error="the worker burnt down")
    result = await run("generate", "hello", "-a", server.address)
    assert (result.exit_code, result.stdout) == (1, " 0 1\n")
    assert "the worker burnt down" in result.stderr


@pytest.mark.parametrize(
    "command",
    [["generate", "hi", "-a"], ["chat", "-m", "hi", "-a"], ["bench", "-a"], ["top", "--once", "-a"], ["health"]],
)
def test_a_server_that_is_not_there_is_named_with_what_to_do(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, NOBODY])
    assert result.exit_code == 1
    assert NOBODY in result.stderr
    assert "quire serve" in result.stderr
    assert "Traceback" not in result.stderr


def test_what_cannot_be_an_address_is_refused() -> None:
    result = CliRunner().invoke(app, ["generate", "hi", "-a", "nowhere"])
    assert result.exit_code == 2
    assert "host:port" in result.stderr


async def test_chat_answers_one_message(server: ScriptedServer) -> None:
    result = await run("chat", "-m", "Hi", "--system", "Be brief.", "-a", server.address)
    assert (result.exit_code, result.stdout) == (0, " 0 1 2 3 4 5 6 7\n")
    sent = next(iter(server.runs.values())).request.chat
    assert [(each.role, each.content) for each in sent.messages] == [("system", "Be brief."), ("user", "Hi")]


async def test_chat_sends_tools_and_variables_of_the_template(server: ScriptedServer, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "f"}}]')
    given = ("--tools", str(tools), "--template-kwargs", '{"enable_thinking": false}')
    assert (await run("chat", "-m", "Hi", *given, "-a", server.address)).exit_code == 0
    sent = next(iter(server.runs.values())).request.chat
    assert (json.loads(sent.tools), json.loads(sent.template_kwargs)) == (
        [{"type": "function", "function": {"name": "f"}}],
        {"enable_thinking": False},
    )
    tools.write_text("{}")
    for wrong, said in ((given[:2], "--tools is no JSON array"), (("--template-kwargs", "{"), "is no JSON: Expecting")):
        result = await run("chat", "-m", "Hi", *wrong, "-a", server.address)
        assert result.exit_code == 2 and said in result.stderr


async def test_tools_are_read_in_utf_8_whatever_the_locale(server: ScriptedServer, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "f", "description": "größer"}}]', encoding="utf-8")
    command = (sys.executable, "-X", "utf8=0", "-m", "quire.cli", "chat", "-m", "Hi", "--tools", str(tools))
    process = await asyncio.create_subprocess_exec(
        *command, "-a", server.address, env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    )
    assert await process.wait() == 0
    sent = next(iter(server.runs.values())).request.chat
    assert json.loads(sent.tools)[0]["function"]["description"] == "größer"
    tools.write_bytes("größer".encode("latin-1"))
    result = await run("chat", "-m", "Hi", "--tools", str(tools), "-a", server.address)
    assert result.exit_code == 2 and "--tools" in result.stderr and "cannot be read" in result.stderr


async def test_chat_remembers_the_conversation_until_it_is_reset(server: ScriptedServer) -> None:
    said = "First\nSecond\n/reset\nThird\n"
    result = await run("chat", "-a", server.address, stdin=said)
    assert result.exit_code == 0
    turns = [[each.content for each in run.request.chat.messages] for run in server.runs.values()]
    answer = " 0 1 2 3 4 5 6 7"
    assert turns == [["First"], ["First", answer, "Second"], ["Third"]]
    assert result.stdout == f"{answer}\n" * 3, "a pipe is not prompted"


async def test_chat_goes_on_after_a_refusal(server: ScriptedServer) -> None:
    server.default = Script(refusals=[quire.FailedPreconditionError("no chat template")])
    result = await run("chat", "-a", server.address, stdin="Hi\nHi again\n/exit\n")
    assert result.exit_code == 1, "a message of the pipe has no answer"
    assert "no chat template" in result.stderr
    assert [each.content for each in next(iter(server.runs.values())).request.chat.messages] == ["Hi again"]


async def test_health_is_an_exit_code(server: ScriptedServer) -> None:
    assert (await run("health", server.address)).exit_code == 0
    await server.set_ready(False)
    result = await run("health", server.address)
    assert (result.exit_code, result.stdout) == (1, "quire.v1.Inference: NOT_SERVING\n")
    assert (await run("health", server.address, "--service", "quire.v1.Nothing")).exit_code == 1


async def test_a_silent_store_is_told_by_health_and_is_no_reason_to_restart(server: ScriptedServer) -> None:
    await server.set_degraded(True)
    result = await run("health", server.address)
    assert (result.exit_code, result.stdout) == (0, "quire.v1.Inference: DEGRADED\n")
    await server.set_degraded(False)
    result = await run("health", server.address)
    assert (result.exit_code, result.stdout) == (0, "quire.v1.Inference: SERVING\n")


async def test_top_prints_one_frame(server: ScriptedServer) -> None:
    result = await run("top", "--once", "-a", server.address)
    assert result.exit_code == 0
    for shown in (
        "running 2",
        "waiting 1, paused 3",
        "200.0 tokens/s",
        "30 used",
        "20 cached",
        "50 free",
        "waste 5.0%",
    ):
        assert shown in result.stdout
    assert "prefix hits 25.0%" in result.stdout
    # of 1,600 slots 456 hold tokens, 8 are reserved, 16 fragments; 12 / (28 + 12) blocks are saved
    assert "tokens 28.5, reserved 0.5, fragments 1.0, free 70.0 %" in result.stdout
    assert "saves 30.0%; 4 shared, 2 pinned, 9 copied" in result.stdout
    assert "preempted 5" in result.stdout
    assert "3 swaps: 18 blocks out, 12 in, host 6/64; recomputed 70" in result.stdout
    assert "last minute, p50/p99: first token 12.0/345 ms, per token 19.1/25.2 ms" in result.stdout
    # border, 2 rows of totals, 1 of latency, 5 of the worker, 1 of the journal, 4 blank: none is broken at 80 columns
    assert len(result.stdout.splitlines()) == 2 + 2 + 1 + 5 + 1 + 4
    assert "NOT DURABLE" in result.stdout


async def test_a_frame_shows_names_with_brackets_as_they_are(client: quire.AsyncClient) -> None:
    stats = await client.stats()
    worker = replace(stats.workers[0], worker_id="w[/bold]0")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(view("[fe80::1]:7847", replace(stats, workers=(worker,)), None, 1.0))
    text = console.export_text()
    assert "quire at [fe80::1]:7847" in text and "w[/bold]0" in text


def test_a_frame_shows_rates_between_two_looks_and_what_is_missing() -> None:
    journal = JournalStats(store="redis", entries=0, pending=9, write_s=0.0, degraded=True)
    before, now = (
        Stats(
            workers=(), num_waiting=0, num_running=0, num_paused=0, num_admitted=0, num_finished=0, num_refused=0,
            prompt_tokens=0, output_tokens=tokens, uptime_s=100.0, epoch=1, journal=journal,
        )
        for tokens in (1000, 1500)
    )  # fmt: skip
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(view("here:1", now, before, 2.0))
    text = console.export_text()
    assert "250.0 tokens/s" in text  # 500 tokens in 2 s
    assert "no worker is connected" in text
    assert "does not answer" in text
    fewer = replace(now, output_tokens=30, uptime_s=10.0)
    for after in (fewer, replace(fewer, epoch=2)):
        console.print(view("here:1", after, before, 2.0))  # another leader counts from 0
        text = console.export_text()
        assert " 3.0 tokens/s" in text and "rates since its start" in text


def test_the_bar_shows_what_is_there_at_all() -> None:
    # 1 of 1000 blocks used: below a tenth of a cell of ten, yet it shows
    assert block_bar(BlockStats(total=1000, used=1, cached=500, free=499), 10).plain == "█▓▓▓▓▓░░░░"
    assert block_bar(BlockStats(total=10, used=10), 10).plain == "█" * 10
    # 2.3 and 7.7 cells: what rounding leaves over is no free block
    assert block_bar(BlockStats(total=100, used=23, cached=77), 10).plain == "██▓▓▓▓▓▓▓▓"
    assert block_bar(BlockStats()).plain == "no pool"


async def test_bench_measures_every_request(server: ScriptedServer, tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    result = await run(
        "bench", "-a", server.address, "--rate", "1000", "--num-requests", "12", "--prompt-len", "2-4",
        "--output-len", "3", "--json", str(file),
    )  # fmt: skip
    assert result.exit_code == 0
    summary = json.loads(file.read_text())
    assert (summary["num_completed"], summary["output_tokens"], summary["failures"]) == (12, 96, {})
    assert summary["time_to_first_token_s"]["p99"] > 0
    assert "12 of 12" in result.stdout
    requests = [run.request for run in server.runs.values()]
    assert all(2 <= len(each.token_ids.ids) <= 4 and each.stopping.ignore_eos for each in requests)
    assert len({each.sampling.seed for each in requests}) == 12
    assert len({each.cache_salt for each in requests}) == 1  # no other run's: each finds its own prefixes alone
    assert requests[0].cache_salt


async def test_bench_measures_requests_with_several_samples(server: ScriptedServer, tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    flags = ("--rate", "inf", "--num-requests", "3", "--beam-width", "4", "--n", "2", "--json", str(file))
    result = await run("bench", "-a", server.address, *flags)
    assert result.exit_code == 0
    summary = json.loads(file.read_text())
    assert (summary["output_tokens"], summary["saving"]) == (48, pytest.approx(0.4))
    assert "40.0% of the blocks" in result.stdout
    requests = [run.request for run in server.runs.values()]
    assert all(each.beam.beam_width == 4 and each.sampling.n == 2 for each in requests)
    assert not any(each.sampling.HasField("temperature") for each in requests)  # nothing is drawn


@pytest.mark.parametrize("flags", [("--prompt-len", "99999"), ("--output-len", "8-99999"), ("--prompt-len", "2040")])
async def test_bench_sends_nothing_that_is_longer_than_the_context(server: ScriptedServer, flags: list[str]) -> None:
    result = await run("bench", "-a", server.address, *flags)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "--prompt-len and --output-len come to" in result.stderr and "context is 2,048" in result.stderr
    assert not server.runs


async def test_bench_counts_failures_and_fails_if_nothing_worked(server: ScriptedServer) -> None:
    server.default = Script(refusals=[quire.OverloadedError("full", 1.0) for _ in range(3)])
    result = await run("bench", "-a", server.address, "--rate", "inf", "--num-requests", "3")
    assert result.exit_code == 1
    assert "refused" in result.stdout
    assert "3, for example: full" in result.stdout
    assert "time to first token" not in result.stdout


@pytest.mark.parametrize("path", ["temperature", "sampling.temperature"])
async def test_bench_calls_a_refused_parameter_by_its_flag(server: ScriptedServer, path: str) -> None:
    violation = quire.FieldViolation(path, "is 500: give at most 100")
    server.default = Script(refusals=[quire.InvalidRequestError(f"{path}: is 500: give at most 100", [violation])])
    result = await run("bench", "-a", server.address, "--num-requests", "1", "--temperature", "500")
    assert result.exit_code == 1
    assert "1, for example: --temperature: is 500: give at most 100" in result.stdout
    assert "Error" not in result.stdout


@pytest.mark.parametrize("flag", ["--prompt-len", "--output-len"])
def test_bench_names_the_flag_of_a_wrong_length(flag: str) -> None:
    assert f"{flag}: 'many' is not a length" in CliRunner().invoke(app, ["bench", "-a", NOBODY, flag, "many"]).stderr


@pytest.mark.parametrize(
    "flags",
    [
        *(["--rate", "0"], ["--rate", "nan"], ["--prompt-len", "many"], ["--output-len", "0"], ["--duration", "-1"]),
        ["--json", "/no/such/folder/file"],
        ["--json", "/proc/summary.json"],
        ["--json", "/"],
        ["--duration", "inf", "--rate", "1"],
        ["--duration", "10", "--rate", "inf"],
        ["--duration", "1e9", "--rate", "1e6"],
        ["--prompt", "hello", "--prompt-len", "7"],
    ],
)
def test_bench_refuses_a_load_that_makes_no_sense(flags: list[str]) -> None:
    assert CliRunner().invoke(app, ["bench", "-a", NOBODY, *flags]).exit_code == 2


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("top --interval-s inf", "--interval-s"),
        ("health --timeout-s inf", "--timeout-s"),
        ("bench --num-requests 1000001", "--num-requests"),
    ],
)
async def test_a_number_that_is_too_large_is_refused_by_its_flag(
    server: ScriptedServer, command: str, flag: str
) -> None:
    """Regression: the first was a traceback, the second had another name, and the third took all memory."""
    result = await run(*command.split(), "-a", server.address)
    assert result.exit_code == 2
    assert flag in result.stderr and "connect_timeout_s" not in result.stderr


def test_without_the_extra_the_command_says_which_one_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from quire.cli.__main__ import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == "quire: the command line needs typer; run pip install '.[cli]' in a clone of Quire\n"


async def start(*arguments: str) -> asyncio.subprocess.Process:
    """A command as a process of its own, which can be interrupted."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


async def interrupt(command: asyncio.subprocess.Process) -> tuple[int | None, bytes]:
    """Ctrl-C, then exit code and standard error. What does not end by it is ended: it would ask a server that stops."""
    command.send_signal(signal.SIGINT)
    try:
        async with asyncio.timeout(patient(20)):
            _, errors = await command.communicate()
    finally:
        if command.returncode is None:
            command.kill()
            await command.wait()
    return command.returncode, errors


async def test_ctrl_c_ends_generate_quietly_and_cancels_the_request(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=9, released=1)
    command = await start("generate", "hello", "-a", server.address)
    assert command.stdout is not None
    assert await command.stdout.readexactly(2) == b" 0"
    assert await interrupt(command) == (130, b"")
    request_id = next(iter(server.runs))
    await server.until(lambda: server.count("cancel", request_id) == 1)


async def test_ctrl_c_at_the_prompt_of_a_chat_says_how_to_leave(server: ScriptedServer) -> None:
    ours, theirs = pty.openpty()
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire.cli", "chat", "-a", server.address),
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "COLUMNS": "200"}, start_new_session=True,
    )  # fmt: skip
    shown = b""

    def read_until(ending: bytes) -> None:
        nonlocal shown
        while not re.search(ending, shown):
            shown += os.read(ours, 4096)

    prompt = rb"> (\x1b\[0m)?$"
    await asyncio.to_thread(read_until, prompt)
    shown = b""
    answered = asyncio.create_task(asyncio.to_thread(read_until, prompt))
    while not answered.done():  # readline misses a signal that comes after its prompt and before it waits for a key
        command.send_signal(signal.SIGINT)
        await asyncio.wait([answered], timeout=10)
    assert b"/exit quits" in shown
    os.write(ours, b"Hi\n")
    await asyncio.to_thread(read_until, b" 0 1 2 3 4 5 6 7")
    os.write(ours, b"/exit\n")
    async with asyncio.timeout(patient(20)):
        assert await command.wait() == 0
    os.close(ours)
    os.close(theirs)


async def test_ctrl_c_ends_a_chat_whose_messages_come_from_a_pipe(server: ScriptedServer) -> None:
    """Regression: it stopped one answer, and the next message was sent."""
    server.default = Script(num_tokens=9, released=1)
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire.cli", "chat", "-a", server.address),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert command.stdin is not None and command.stdout is not None
    command.stdin.write(b"Hi\nHi again\n")
    assert await command.stdout.readexactly(2) == b" 0"
    assert await interrupt(command) == (130, b"")
    assert len(server.runs) == 1


async def test_a_refusal_in_a_conversation_names_the_flag(server: ScriptedServer) -> None:
    violation = quire.FieldViolation("stopping.max_tokens", "is 0: give at least 1")
    server.default = Script(refusals=[quire.InvalidRequestError.of([violation])])
    result = await run("chat", "-a", server.address, "--max-tokens", "0", stdin="Hi\n")
    assert result.stderr == "quire: --max-tokens: is 0: give at least 1\n"


async def test_top_shows_its_frames_on_a_terminal_that_cannot_move_its_cursor(server: ScriptedServer) -> None:
    """Regression: such a terminal, as within an editor, stayed empty."""
    ours, theirs = pty.openpty()
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire.cli", "top", "-a", server.address, "--interval-s", "0.1"),
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "dumb", "COLUMNS": "80"},
    )  # fmt: skip
    try:
        await server.until(lambda: server.num_looks >= 3)
    finally:
        await interrupt(command)
    os.write(theirs, b"end")  # there is something to read in any case
    shown = os.read(ours, 65536)
    os.close(ours)
    os.close(theirs)
    assert b"quire at" in shown and b"\x1b" not in shown


async def test_ctrl_c_ends_bench_quietly_and_cancels_its_requests(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=9, released=0)
    command = await start("bench", "-a", server.address, "--rate", "inf", "--num-requests", "4")
    await server.until(lambda: len(server.runs) == 4)
    code, errors = await interrupt(command)
    assert (code, b"Traceback" in errors) == (130, False)
    await server.until(lambda: all(server.count("cancel", each) == 1 for each in server.runs))


async def test_bench_sums_up_what_had_ended_when_it_was_interrupted(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=9, released=0)
    planned = [PlannedRequest(at_s=0.0, prompt=f"{number}", max_tokens=9, seed=number) for number in range(3)]
    ended = asyncio.Semaphore(0)
    async with quire.AsyncClient(server.address) as client:
        running = asyncio.create_task(run_load(client, planned, {}, ended.release))
        await server.until(lambda: len(server.runs) == 3)
        for request_id in list(server.runs)[:2]:
            server.release(request_id)
            await ended.acquire()
        running.cancel()
        summary = await running
        assert (summary.num_completed, summary.num_requests, summary.interrupted) == (2, 2, True)
        await server.until(lambda: sum(server.count("cancel", each) for each in server.runs) == 1)


async def test_top_shows_frame_after_frame_until_it_is_interrupted(server: ScriptedServer) -> None:
    command = await start("top", "-a", server.address, "--interval-s", "0.1")
    await server.until(lambda: server.num_looks >= 3)
    code, errors = await interrupt(command)
    assert (code, errors) == (130, b"")
