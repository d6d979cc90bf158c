"""Log lines: one object or one readable line each, from any number of writers, in a file of bounded size."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from quire.log_text import readable_line
from quire.redaction import has_password, without_passwords
from tests.patience import patient
from tests.services import ROOT
from tests.stopped_output import Kind, let_go_on, stopped_output

NUM_LINES = 1_000

_TWO_PAIRS_OF_THREADS = f"""
import logging, threading, structlog
from common.log import set_up_logging

set_up_logging("test", "info")

def bound():
    for number in range({NUM_LINES}):
        structlog.get_logger().info("bound", number=number)

def standard():
    for number in range({NUM_LINES}):
        logging.getLogger("standard").warning("number %d", number)

threads = [threading.Thread(target=target) for target in (bound, standard, bound, standard)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_lines_of_both_kinds_from_many_threads_stay_apart() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _TWO_PAIRS_OF_THREADS], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=True
    )
    lines = [json.loads(line) for line in run.stderr.splitlines()]
    assert len(lines) == 4 * NUM_LINES
    assert sum(line["event"] == "bound" for line in lines) == 2 * NUM_LINES


def run_code(code: str, stderr: int = subprocess.PIPE) -> "subprocess.CompletedProcess[str]":
    start = "import logging, os, pathlib, structlog\nfrom common.log import set_up_logging\n"
    return subprocess.run([sys.executable, "-c", start + code], cwd=ROOT, stderr=stderr, text=True, check=True)


SAYS = """
log = structlog.get_logger()
log.warning("slow path", reason="no compiler, none", store="redis://u:pw-1@h/0?password=pw-1")
logging.getLogger("library").error("cannot reach redis://:pw-1@h")
try:
    raise ValueError("bad url redis://:pw-1@h")
except ValueError:
    log.exception("it failed")
"""


def test_a_log_on_a_terminal_is_lines_to_read() -> None:
    ours, theirs = pty.openpty()
    run_code("set_up_logging('scheduler', 'info')" + SAYS, theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    os.close(theirs)
    assert "warning scheduler: slow path" in shown
    assert "reason='no compiler, none'" in shown
    assert '{"' not in shown
    assert "ValueError: bad url" in shown


@pytest.mark.parametrize(("form", "is_json"), [("auto", True), ("json", True), ("console", False)])
def test_a_log_elsewhere_is_json_unless_told_otherwise(form: str, is_json: bool) -> None:
    said = run_code(f"set_up_logging('scheduler', 'info', form={form!r})" + SAYS).stderr
    assert said.startswith("{") is is_json
    if is_json:
        events = [json.loads(line) for line in said.splitlines()]
        assert [each["event"] for each in events][::2] == ["slow path", "it failed"]


@pytest.mark.parametrize("form", ["json", "console"])
def test_no_password_is_logged(form: str) -> None:
    said = run_code(f"set_up_logging('scheduler', 'info', form={form!r})" + SAYS).stderr
    assert "pw-1" not in said
    assert said.count("***") >= 4


@pytest.mark.parametrize("name", ["password", "passwd", "auth", "ssl_password"])
@pytest.mark.parametrize("before", ["?", "?ssl_certfile=a&"])
def test_every_password_that_a_store_takes_in_a_query_is_hidden(name: str, before: str) -> None:
    url = f"rediss://h:1/0{before}{name}=pw-1"
    assert has_password(url)
    assert without_passwords(f"cannot reach {url}&db=1") == f"cannot reach {url.replace('pw-1', '***')}&db=1"
    assert not has_password("rediss://h:1/0?ssl_certfile=a&ssl_keyfile=b")


def test_a_log_file_is_set_aside_while_it_is_written_and_no_line_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "service.log"
    code = f"""
set_up_logging("s", "info", file=pathlib.Path({str(file)!r}), max_bytes=40_000)
for number in range(600):
    structlog.get_logger().info("counted", number=number)
    if number == 590:
        os.write(2, b"what a library prints\\n")
"""
    run_code(code)
    lines = (tmp_path / "service.log.1").read_text().splitlines() + file.read_text().splitlines()
    numbers = [json.loads(line)["number"] for line in lines if line.startswith("{")]
    assert numbers == list(range(numbers[0], 600))  # what is oldest may have gone with an older file
    assert len(numbers) > 200
    assert "what a library prints" in file.read_text()  # after more than one change of files
    assert sorted(each.name for each in tmp_path.iterdir()) == ["service.log", "service.log.1"]
    assert all(each.stat().st_size < 41_000 and each.stat().st_mode & 0o777 == 0o600 for each in tmp_path.iterdir())


def test_a_log_that_cannot_be_written_stops_nobody() -> None:
    code = """
ours, theirs = os.openpty()
os.dup2(theirs, 2)
os.close(theirs)
os.close(ours)  # from now on writing fails with EIO
set_up_logging("s", "info")
structlog.get_logger().info("lost")
logging.getLogger("library").error("lost, too")
"""
    run_code(code)


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_log_whose_reader_stands_still_stops_nobody_and_is_written_on_once_it_reads(kind: Kind) -> None:
    """Regression: Ctrl-S, or a collector of logs that hung, kept a service from everything at its next line."""
    ours, theirs = stopped_output(kind)
    code = """
import logging, sys, structlog
from common.log import set_up_logging

set_up_logging("s", "info", form="json")
for number in range(1_000):
    structlog.get_logger().info("not read", number=number, long=9_000 * "x")
logging.getLogger("library").error("nor this")
print("went on", flush=True)
sys.stdin.readline()
structlog.get_logger().info("read", long=9_000 * "x")
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs) as run:
        assert run.stdin is not None and run.stdout is not None
        try:
            assert run.stdout.readline() == b"went on\n"
            let_go_on(kind, ours, theirs)
            run.stdin.write(b"\n")
            run.stdin.flush()
            shown = b""
            while b'"read"' not in shown or not shown.endswith(b"\n"):
                shown += os.read(ours, 65536)
            assert json.loads(shown.splitlines()[-1])["long"] == 9_000 * "x"
            assert run.wait(patient(30)) == 0
        finally:
            run.kill()
    os.close(ours)
    os.close(theirs)


def test_a_line_that_is_no_entry_is_shown_as_it_is_and_steers_no_terminal() -> None:
    assert readable_line("Traceback (most recent call last):") == "Traceback (most recent call last):"
    assert "\033" not in readable_line("\033[2Jgone") + readable_line('{"event": "x", "name": "\\u001b[2J"}')
    assert readable_line('{"event": 7') == '{"event": 7'


def test_a_value_does_not_begin_a_line() -> None:
    """Regression: whoever asked a gateway for a path with a line break wrote a line of its own into a readable log."""
    entry = {"event": "call ended", "path": "/v1/x\n12:00:00.000\terror", "name": "é雪\u009b"}
    assert readable_line(json.dumps(entry)).endswith("path='/v1/x\\n12:00:00.000\\terror'  name='é雪\\x9b'")


def test_a_log_goes_on_in_a_new_file_once_one_can_be_opened_again(tmp_path: Path) -> None:
    file = tmp_path / "service.log"
    code = f"""
import resource
from common.log_file import RotatingLog

def write(text):
    log.write(text + "x" * 100 + "\\n")

log = RotatingLog(pathlib.Path({str(file)!r}), 100)
write("first")
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
write("no file is left")
write("nor here")
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
write("last")
"""
    run_code(code)
    assert file.read_text().startswith("last")
    assert [line[:3] for line in (tmp_path / "service.log.1").read_text().splitlines()] == ["fir", "no ", "nor"]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_line_behind_one_that_was_cut_by_a_full_disk_begins_anew(tmp_path: Path, restarted: bool) -> None:
    file = tmp_path / "service.log"
    code = f"""
import resource, signal
from common.log_file import RotatingLog

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = RotatingLog(pathlib.Path({str(file)!r}), 1000)
log.write("first\\n")
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))  # stands for the end of the disk: a write takes what fits
log.write("second\\n")
log.write("third\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
if {restarted}:
    log = RotatingLog(pathlib.Path({str(file)!r}), 1000)
log.write("fourth\\n")
log.write("fifth\\n")
"""
    run_code(code)
    assert file.read_text() == "first\nse\nfourth\nfifth\n"
