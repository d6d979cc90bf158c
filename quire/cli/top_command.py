"""`quire top`: the server's workers, requests and memory, live in the terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

import quire
from quire.cli import options
from quire.cli.oldest_requests import oldest_requests
from quire.cli.output import errors_explained, out
from quire.cli.top_view import MAX_SHOWN, view
from quire.params import DEFAULT_ADDRESS


def top(
    address: options.Address = DEFAULT_ADDRESS,
    interval_s: Annotated[float, typer.Option(min=0.1, max=86_400, help="Seconds between two frames.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
) -> None:
    """Watch workers, requests, KV memory, speed and latency."""
    with errors_explained(), quire.Client(address, connect_timeout_s=options.CONNECT_TIMEOUT_S) as client:
        if once:
            out.print(view(address, client.stats(), None, interval_s, *oldest_requests(client, MAX_SHOWN)))
            return
        _watch(client, interval_s)


def _watch(client: quire.Client, interval_s: float) -> None:
    """Shows a frame every interval until interrupted; shows an outage until the server is back."""
    before = client.stats()
    taken_s = time.monotonic()
    first = view(client.address, before, None, interval_s, *oldest_requests(client, MAX_SHOWN))
    with _screen() as show:
        show(first)
        while True:
            time.sleep(interval_s)
            try:
                now, requests = client.stats(), oldest_requests(client, MAX_SHOWN)
            except quire.UnavailableError as error:
                show(Text(error.message))
                continue
            now_s = time.monotonic()
            show(view(client.address, now, before, now_s - taken_s, *requests))
            before, taken_s = now, now_s


@contextmanager
def _screen() -> Iterator[Callable[[RenderableType], None]]:
    """Function that shows a frame: it replaces the last one on a terminal that can, and follows it anywhere else."""
    if not out.is_terminal or out.is_dumb_terminal:
        yield out.print
        return
    with Live(console=out, screen=True, auto_refresh=False) as live:
        yield lambda frame: live.update(frame, refresh=True)
