"""Messages of `quire serve`: nobody waits for a terminal that is stopped, or for a pipe that nobody reads."""

import os
import subprocess
import sys

import pytest

from tests.patience import patient
from tests.services import ROOT
from tests.stopped_output import Kind, let_go_on, stopped_output

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


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_nobody_waits_for_one_that_takes_nothing_and_what_it_takes_later_is_whole(kind: Kind, goes_on: bool) -> None:
    """Regression: Ctrl-S, or a pager that had enough, kept dead services from being restarted, and SIGTERM waiting."""
    ours, theirs = stopped_output(kind)
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
            shown = let_go_on(kind, ours, theirs)
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
