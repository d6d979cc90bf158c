"""Messages of `quire serve`: nobody waits for a terminal that is stopped, or for a pipe that nobody reads."""

import os
import pty
import subprocess
import sys
import termios
from contextlib import suppress

import pytest

from tests.patience import patient
from tests.services import ROOT

# Tells on another pipe that it went on, and ends when its input does.
SAYS = """
import os, sys
from quire.cli.supervisor.announcer import Announcer

announcer = Announcer("json")
announcer.print_message("first")
announcer.show_live_line("live")
announcer.print_log_line('{"event": "second"}')
announcer.print_greeting("third", [("model", "m")])
os.write(int(sys.argv[1]), b"went on")
sys.stdin.read()
"""


def stopped(kind: str) -> tuple[int, int]:
    """Both ends of a pipe that is full, or of a terminal that is stopped as by Ctrl-S."""
    if kind == "terminal":
        ours, theirs = pty.openpty()
        termios.tcflow(theirs, termios.TCOOFF)
        return ours, theirs
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with suppress(BlockingIOError):
        while True:
            os.write(theirs, bytes(4096))
    os.set_blocking(theirs, True)
    return ours, theirs


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_nobody_waits_for_one_that_takes_nothing_and_what_it_takes_later_is_whole(kind: str, goes_on: bool) -> None:
    """Regression: Ctrl-S, or a pager that had enough, kept dead services from being restarted, and SIGTERM waiting."""
    ours, theirs = stopped(kind)
    told, tells = os.pipe()
    said = subprocess.Popen(
        [sys.executable, "-c", SAYS, str(tells)], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs,
        pass_fds=(tells,), cwd=ROOT,
    )  # fmt: skip
    os.close(tells)
    assert said.stdin is not None
    try:
        assert os.read(told, 100) == b"went on"
        if goes_on:
            if kind == "terminal":
                termios.tcflow(theirs, termios.TCOON)
            shown = b""
            while b"  model    m" not in shown:
                shown += os.read(ours, 65536)
            assert [each for each in (b"first", b"second", b"third") if each not in shown] == []
            assert shown.index(b"first") < shown.index(b"second") < shown.index(b"third")
        said.stdin.close()
        assert said.wait(patient(30)) == 0
    finally:
        said.kill()
        said.wait()
        for fd in (ours, theirs, told):
            os.close(fd)
