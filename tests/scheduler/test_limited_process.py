"""A program of a model's that reads nothing: what it is sent must not wait for it longer than its answer would."""

import signal
import time
from pathlib import Path

import pytest

from scheduler_svc.text.limited_process import LENGTH, LimitedProcess, ProcessEndedError
from tests.patience import patient

MUCH = bytes(1 << 20)  # more than a pipe holds
WALL_S = 0.3

ECHO = f"""
import struct, sys
while head := sys.stdin.buffer.read({LENGTH.size}):
    (length,) = struct.unpack({LENGTH.format!r}, head)
    said = sys.stdin.buffer.read(length)
    sys.stdout.buffer.write(head + said)
    sys.stdout.buffer.flush()
"""


def program(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("first", "request_bytes"), [(MUCH, b"x"), (b"x", MUCH)])
def test_a_process_that_reads_nothing_is_killed_in_time(tmp_path: Path, first: bytes, request_bytes: bytes) -> None:
    """Regression: the write waited for ever, and all others that want a tokenizer or a grammar behind it."""
    process = LimitedProcess(program(tmp_path, "import time; time.sleep(1000)"), first)
    began_s = time.monotonic()
    with pytest.raises(ProcessEndedError):
        process.ask(request_bytes, wall_s=WALL_S, most_bytes=100)
    assert time.monotonic() - began_s < patient(20)
    assert not process.is_running


def test_a_process_that_was_stopped_between_two_requests_is_killed_in_time(tmp_path: Path) -> None:
    process = LimitedProcess(program(tmp_path, ECHO), b"first")
    assert process.ask(b"", wall_s=patient(20), most_bytes=100) == (b"f", b"irst")
    process._process.send_signal(signal.SIGSTOP)
    with pytest.raises(ProcessEndedError):
        process.ask(MUCH, wall_s=WALL_S, most_bytes=100)
    assert not process.is_running


def test_its_program_finds_the_packages_of_the_process_that_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: of `pip install --user`, or by PYTHONPATH, no model was served: its tokenizer.json got the blame."""
    packages, working = tmp_path / "packages", tmp_path / "working"
    for folder in (packages, working):
        folder.mkdir()
    (packages / "found_there.py").write_text("")
    (working / "json.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.chdir(working)
    process = LimitedProcess(program(tmp_path, f"import found_there, json{ECHO}"), b"first")
    assert process.ask(b"", wall_s=patient(20), most_bytes=100) == (b"f", b"irst")
    process.kill()


def test_what_is_larger_than_a_pipe_arrives_whole(tmp_path: Path) -> None:
    process = LimitedProcess(program(tmp_path, ECHO), MUCH)
    answer = process.ask(b"", wall_s=patient(60), most_bytes=len(MUCH))
    assert answer == (MUCH[:1], MUCH[1:])
    process.kill()
