"""The clients of one scenario: processes that ask without end until they are told to stop, and their history, live."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import quire
from tests.chaos.asks import ChaosAsk
from tests.chaos.history import History, Told
from tests.patience import patient
from tests.services import ROOT

POLL_S = 0.02
FLOW_TIMEOUT_S = 120.0
END_TIMEOUT_S = 240.0
MIN_STREAMING = 2
MIN_GAPS = 20  # of a request whose speed is judged


class ClientProcess:
    """One client that writes its history."""

    def __init__(self, address: str, plan: Path, folder: Path, name: str, attach: Path | None = None) -> None:
        self.history = folder / f"{name}.jsonl"
        self.name = name
        self.was_killed = False
        self._log = folder / f"{name}.log"
        more = [] if attach is None else ["--attach", str(attach)]
        files = ["--plan", str(plan), "--history", str(self.history), "--name", name]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.client", "--address", address, *files, *more],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stderr=log,
            )

    def stop_asking(self) -> None:
        """Submit no more requests; end when the running ones have ended."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()

    def send(self, number: signal.Signals) -> float:
        """Send a signal; return the time, by the monotonic clock."""
        self.was_killed = self.was_killed or number is signal.SIGKILL
        at_s = time.monotonic()
        self.process.send_signal(number)
        return at_s

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def close(self) -> None:
        self.stop_asking()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def has_failed(self) -> bool:
        return self.process.poll() not in (None, 0)

    @property
    def complaint(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


class ClientLoad:
    """Client processes with the same asks. Request ids begin with the load's name, which is unique in a store."""

    def __init__(
        self,
        address: str,
        asks: Sequence[ChaosAsk],
        folder: Path,
        name: str,
        *,
        concurrency: int,
        num_processes: int = 2,
        flow_tokens: int = 300,
        on_disconnect: quire.OnDisconnect = quire.OnDisconnect.CONTINUE,
        reconnect_timeout_s: float = 60.0,
    ) -> None:
        self.asks = list(asks)
        self.history = History()
        self.clients: list[ClientProcess] = []
        self._name = name
        self._flow_tokens = flow_tokens
        self._address = address
        self._folder = folder
        self._plan = folder / "plan.json"
        plan = {
            "asks": [{"prompt": list(ask.prompt), "params": _as_json(ask)} for ask in asks],
            "concurrency": max(1, concurrency // num_processes),
            "reconnect_timeout_s": reconnect_timeout_s,
            "on_disconnect": on_disconnect.value,
        }
        self._plan.write_text(json.dumps(plan))
        for _ in range(num_processes):
            self.add_client()

    def add_client(self, *, attach: Path | None = None) -> ClientProcess:
        client = ClientProcess(self._address, self._plan, self._folder, f"{self._name}-c{len(self.clients)}", attach)
        self.clients.append(client)
        return client

    def update(self) -> None:
        self.history.update([client.history for client in self.clients])

    async def until(self, holds: Callable[[], bool], what: str, timeout_s: float = FLOW_TIMEOUT_S) -> None:
        """Read on until the condition holds. Raises AssertionError after the timeout, or if a client breaks off."""
        give_up_s = time.monotonic() + patient(timeout_s)
        while True:
            self.update()
            if holds():
                return
            for client in self.clients:
                assert client.was_killed or not client.has_failed, f"a client ended:\n{client.complaint}"
            assert time.monotonic() < give_up_s, f"not within {timeout_s:g} s: {what}"
            await asyncio.sleep(POLL_S)

    async def until_flowing(self, num_tokens: int | None = None) -> None:
        """Wait until this many more tokens have arrived, and several requests are in the middle of their output."""
        self.update()
        num_tokens = num_tokens or self._flow_tokens
        enough = self.history.num_tokens + num_tokens
        await self.until(
            lambda: self.history.num_tokens >= enough and len(self.streaming()) >= MIN_STREAMING,
            f"{num_tokens} more tokens",
        )

    async def first_token_after(self, at_s: float) -> float:
        """Time of the first token after a moment."""
        await self.until(lambda: self._first_after(at_s) is not None, "a token after the fault")
        first = self._first_after(at_s)
        assert first is not None
        return first

    def streaming(self, client: ClientProcess | None = None, at_s: float | None = None) -> list[Told]:
        """Requests in the middle of an output that comes as it is made, now or at a moment, of one client or of all."""
        prefix = "" if client is None else f"{client.name}-"
        live = self.history.live_at(time.monotonic() if at_s is None else at_s)
        return [told for told in live if self.asks[told.ask].streams and told.request_id.startswith(prefix)]

    async def all_went_on_after(self, at_s: float, client: ClientProcess | None = None) -> float:
        """Time at which the last request that streamed at a moment had its next token, or its end."""
        self.update()
        live = self.streaming(client, at_s)
        moments: dict[str, float] = {}

        def all_went_on() -> bool:
            for told in live:
                later = [piece.at_s for piece in told.pieces if piece.at_s > at_s]
                later += [told.ended_s] if told.ended_s is not None else []
                if told.request_id not in moments and later:
                    moments[told.request_id] = min(later)
            return len(moments) == len(live)

        await self.until(all_went_on, "every request went on after the fault")
        return max(moments.values(), default=at_s)

    def gaps(self, from_s: float, to_s: float) -> list[list[float]]:
        """Times between the tokens of each request that streamed in a span, where there are enough to judge."""
        found = []
        for told in self.history.requests.values():
            moments = [piece.at_s for piece in told.pieces if from_s <= piece.at_s <= to_s and piece.sample == 0]
            if self.asks[told.ask].streams and len(moments) > MIN_GAPS:
                found.append([later - earlier for earlier, later in pairwise(moments)])
        return found

    async def finish(self, timeout_s: float = END_TIMEOUT_S) -> History:
        """Let all clients end. Raises AssertionError if one does not, or breaks off."""
        for client in self.clients:
            client.stop_asking()
        await self.until(lambda: all(client.has_ended for client in self.clients), "clients end", timeout_s)
        self.update()
        return self.history

    def close(self) -> None:
        for client in self.clients:
            client.close()

    def _first_after(self, at_s: float) -> float | None:
        moments = (piece.at_s for told in self.history.requests.values() for piece in told.pieces)
        return min((moment for moment in moments if moment > at_s), default=None)


def _as_json(ask: ChaosAsk) -> dict[str, object]:
    """The ask's parameters; a beam search's by its flat names, which JSON can say."""
    params: dict[str, object] = dict(ask.params())
    if params.pop("beam", None) is not None:
        params["beam_width"] = ask.beam_width
        params["length_penalty"] = ask.length_penalty
        params["early_stopping"] = ask.early_stopping
    return params
