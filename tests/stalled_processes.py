"""Runs a command while random processes of it stand still for a moment, again and again, as on a machine with no time.

    python -m tests.stalled_processes --seed 2 .venv/bin/python -m pytest tests/e2e    `make test-stalled` does so

Each process below the command is stopped and continued, stores and the command itself among them. What fails then and
not otherwise depends on a moment that nobody controls: a defect of the test, or of the product. The seed decides the
draws, but not which process is drawn: processes come when they come. A process that a test stops by itself, meanwhile,
goes on too soon, so tests of frozen processes are not for this.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

TICK_S = 0.02


class Staller:
    """Stops processes at random, and continues each when its time is over.

    rate: stalls of each process a second
    stall_s: shortest and longest
    """

    def __init__(self, seed: int, rate: float, stall_s: tuple[float, float]) -> None:
        self._random = random.Random(seed)
        self._rate = rate
        self._stall_s = stall_s
        self._ends_s: dict[psutil.Process, float] = {}
        self.num_stalls = 0

    def tick(self, processes: Iterable[psutil.Process], now_s: float) -> None:
        """Continue those whose time is over, and stop some of the others."""
        for process in [each for each, end_s in self._ends_s.items() if end_s <= now_s]:
            self._go_on(process)
        for process in processes:
            if process not in self._ends_s and self._random.random() < self._rate * TICK_S:
                self._stop(process, now_s)

    def close(self) -> None:
        """Continue all."""
        for process in list(self._ends_s):
            self._go_on(process)

    def _stop(self, process: psutil.Process, now_s: float) -> None:
        with suppress(psutil.NoSuchProcess):
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                return
            process.suspend()
            self._ends_s[process] = now_s + self._random.uniform(*self._stall_s)
            self.num_stalls += 1

    def _go_on(self, process: psutil.Process) -> None:
        del self._ends_s[process]
        with suppress(psutil.NoSuchProcess):
            process.resume()


def run_stalled(command: list[str], staller: Staller) -> int:
    """Run a command to its end, its processes stalled; its exit status."""
    root = psutil.Popen(command)
    try:
        while root.is_running() and root.status() != psutil.STATUS_ZOMBIE:
            staller.tick([root, *root.children(recursive=True)], time.monotonic())
            time.sleep(TICK_S)
    finally:
        staller.close()
    return int(root.wait())


def main() -> None:
    """Reads the command line, runs the command, ends with its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.1, help="stalls of each process a second")
    parser.add_argument("--stall-s", type=float, nargs=2, default=(0.2, 1.0), help="shortest and longest stall")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    staller = Staller(options.seed, options.rate, tuple(options.stall_s))
    status = run_stalled(options.command, staller)
    sys.stderr.write(f"stalled {staller.num_stalls} times; seed {options.seed}\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
