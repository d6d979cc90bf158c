"""A client process of a chaos run: asks through the SDK, so many requests at once, and writes down all it is told.

    python -m tests.chaos.client --address ADDRESS --plan FILE --history FILE --name NAME [--attach HISTORY]

It starts one request after another until its standard input ends, then waits for those that run. With `--attach` it
goes on where another client process was killed, from the positions in that one's history, and starts nothing new.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import quire
from tests.chaos.history import History, HistoryWriter, Told

RETRIES = 100_000  # of a submission that is refused for now: none of these clients gives up early


class Asker:
    """Runs the plan's requests."""

    def __init__(self, client: quire.AsyncClient, plan: dict[str, Any], history: HistoryWriter, name: str) -> None:
        self._client = client
        self._asks = plan["asks"]
        self._on_disconnect = quire.OnDisconnect(plan["on_disconnect"])
        self._history = history
        self._name = name
        self._num_started = 0

    async def keep_asking(self, concurrency: int, stop: asyncio.Event) -> None:
        """Submit requests until `stop`; then read the running ones to their end."""
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._ask_until(stop))

    async def go_on(self, others: History) -> None:
        """Read on where another client stopped."""
        async with asyncio.TaskGroup() as group:
            for told in others.requests.values():
                if told.ended_s is None:
                    group.create_task(self._take_over(told))

    async def _ask_until(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            number = self._num_started
            self._num_started += 1
            index = number % len(self._asks)
            request_id = f"{self._name}-{number}"
            self._history.submitted(request_id, index)
            await self._read(request_id, partial(self._submit, request_id, index))

    async def _take_over(self, told: Told) -> None:
        if told.accepted_s is None:
            await self._read(told.request_id, partial(self._submit, told.request_id, told.ask))
        else:
            await self._read(told.request_id, partial(self._client.attach, told.request_id, told.next_positions))

    def _submit(self, request_id: str, index: int) -> quire.CompletionStream:
        ask = self._asks[index]
        params = {**ask["params"], "request_id": request_id, "on_disconnect": self._on_disconnect}
        return self._client.stream(ask["prompt"], **params)

    async def _read(self, request_id: str, open_stream: Callable[[], quire.CompletionStream]) -> None:
        try:
            async with open_stream() as stream:
                accepted = await stream.accepted()
                self._history.accepted(request_id, attached=accepted.attached)
                async for chunk in stream:
                    self._history.chunk(request_id, chunk)
            self._history.ended(request_id)
        except quire.QuireError as error:
            self._history.ended(request_id, error=error)


async def run(arguments: argparse.Namespace) -> None:
    plan = json.loads(arguments.plan.read_text())
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.run_in_executor(None, lambda: (sys.stdin.read(), loop.call_soon_threadsafe(stop.set)))
    options = {"reconnect_timeout_s": plan["reconnect_timeout_s"], "connect_timeout_s": plan["reconnect_timeout_s"]}
    with arguments.history.open("w") as file:
        async with quire.AsyncClient(arguments.address, retries=RETRIES, **options) as client:
            asker = Asker(client, plan, HistoryWriter(file), arguments.name)
            if arguments.attach is not None:
                others = History()
                others.update([arguments.attach])
                await asker.go_on(others)
            else:
                await asker.keep_asking(plan["concurrency"], stop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--history", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--attach", type=Path)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
