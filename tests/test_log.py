"""Log lines: one JSON object each, whoever writes and however many at a time."""

import json
import subprocess
import sys

from tests.services import ROOT

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
