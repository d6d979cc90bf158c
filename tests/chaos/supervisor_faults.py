"""Death of the supervisor of `quire serve`: its services end or go on, and the next start loses nothing."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.chaos.deployment import Place
from tests.chaos.scenario import NOTHING_LOST, Figures, Target, speed
from tests.chaos.stage import Scenario, Stage
from tests.services import DEMO_MODEL, ROOT, free_address

ON_ITS_WAY_S = 0.1
NUM_WORKERS = 2
END_S = 60.0


class Serve:
    """One `quire serve` after another on one data folder."""

    def __init__(self, folder: Path) -> None:
        self.address = free_address()
        self._folder = folder
        self.logs = folder / "data" / "logs"  # of its services
        self._log = folder / "serve.log"
        self.process = self._start()

    def again(self) -> None:
        self.process = self._start()

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def end(self) -> None:
        """End the supervisor cleanly, and its store with it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(END_S)

    def _start(self) -> "subprocess.Popen[bytes]":
        flags = ("--listen", self.address, "--data-dir", str(self._folder / "data"), "--workers", str(NUM_WORKERS))
        command = [
            sys.executable,
            "-m",
            "quire.cli",
            "serve",
            str(DEMO_MODEL),
            *flags,
            "--gateways",
            "0",
            "--drain-timeout-s",
            "0",  # else what runs ends before its scheduler does, and the next one finds an empty journal
        ]
        with self._log.open("ab") as log:
            environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)


async def it_is_killed(stage: Stage) -> Figures:
    await stage.reference()
    serve = Serve(stage.folder())
    stage.cleanup(serve.end)
    place = Place(serve.address)
    workers = [f"worker-{index}" for index in range(NUM_WORKERS)]
    await place.until_driven(*workers)
    load = stage.load(serve.address)
    await load.until_flowing()
    struck_s = time.monotonic()
    serve.process.kill()
    await asyncio.to_thread(serve.process.wait)
    serve.again()
    await load.until(lambda: "already running" in serve.said(), "the store is adopted")
    adopted_s = time.monotonic()
    recovered_s = await load.first_token_after(adopted_s + ON_ITS_WAY_S)
    await load.until_flowing()
    figures = await stage.figures(load, place, struck_s=struck_s, recovered_s=recovered_s)
    recovered = num_recovered(serve.logs)
    figures.more = {"recovered_requests": recovered, "nothing_recovered": int(recovered == 0)}
    return figures


def num_recovered(logs: Path) -> int:
    """Count the live requests that the last scheduler found in the journal; 0 if it is the first one, too."""
    read = []
    for line in "".join(path.read_text(errors="replace") for path in logs.glob("scheduler*.log")).splitlines():
        with suppress(json.JSONDecodeError):
            said = json.loads(line)
            if isinstance(said, dict) and said.get("event") == "journal read":
                read.append(int(said["num_live"]))
    return read[-1] if len(read) > 1 else 0


SCENARIOS = (
    Scenario(
        fault="SUP",
        title="the supervisor of quire serve killed and started again",
        injected="SIGKILL of quire serve; the same command again at once",
        promise="P1 P2 P7",
        play=it_is_killed,
        targets=(*NOTHING_LOST, Target(figure="nothing_recovered", at_most=0), speed("recover_s", 60)),
    ),
)
