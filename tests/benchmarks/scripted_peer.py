"""A runner of no peer: made tokens at made moments, by the real harness. Its options say what it does wrong.

python -m tests.benchmarks.scripted_peer
"""

import os
import time
from typing import Any

from benchmarks.peers.runners.harness import Recorder, Setup, serve


class Scripted:
    """Engine whose token n of request i is i + n. `at_load`, `at_run`: a fault, "raise", "exit", "hang" or "short"."""

    def __init__(self, setup: Setup) -> None:
        self.computes_in = setup.dtype
        self._options: dict[str, Any] = dict(setup.options)
        os.write(1, b"this is no answer\n")
        _do(self._options.get("at_load"))

    def run(self, recorder: Recorder) -> None:
        _do(self._options.get("at_run"))
        for request in recorder.requests:
            recorder.record_sent(request.index)
            num_made = request.num_output - (self._options.get("at_run") == "short")
            recorder.record_tokens(request.index, range(request.index, request.index + num_made))

    def close(self) -> None:
        pass


def _do(what: str | None) -> None:
    if what == "raise":
        raise ValueError("as scripted")
    if what == "exit":
        os._exit(3)
    if what == "hang":
        time.sleep(60)


if __name__ == "__main__":
    serve(Scripted, ("pip", "no-such-package"))
