"""Open files of a process: its limit is raised for its connections, and where it cannot be, connections are refused."""

import resource
import subprocess
import sys

import pytest

from common.open_files import RESERVE
from tests.services import ROOT

_CODE = """
import resource, sys
from common.log import set_up_logging
from common.open_files import allow_connections

set_up_logging("s", "info")
soft, hard, most = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(allow_connections(most, option="--max-connections"), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def allowed(soft: int, hard: int, most: int) -> tuple[list[int], str]:
    """Connections that are allowed, the limit of files then, and the log."""
    command = [sys.executable, "-c", _CODE, *map(str, (soft, hard, most))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [int(each) for each in done.stdout.split()], done.stderr


@pytest.mark.parametrize(
    ("soft", "hard", "most", "expected"),
    [
        (256, 1024, 500, [500, 500 + RESERVE]),
        (600, 1024, 500, [500, 600]),
        (256, 1024, 0, [1024 - RESERVE, 1024]),
        (32, 32, 0, [1, 32]),
    ],
)
def test_the_limit_is_raised_as_far_as_connections_need(soft: int, hard: int, most: int, expected: list[int]) -> None:
    assert allowed(soft, hard, most) == (expected, "")


def test_a_limit_that_is_too_low_is_told_with_what_to_do() -> None:
    found, said = allowed(256, 256, 500)
    assert found == [256 - RESERVE, 256]
    assert "fewer connections than --max-connections" in said and f"ulimit -n) to {500 + RESERVE}" in said
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256  # ours is as before
