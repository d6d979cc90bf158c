"""`quire shards`: lists the shards, and changes their number while requests run."""

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

import quire
from quire.cli import options
from quire.cli.output import errors_explained, out
from quire.params import DEFAULT_ADDRESS


def shards(
    number: Annotated[
        int | None,
        typer.Argument(help="Number of shards that shall take requests; absent: list them.", metavar="N"),
    ] = None,
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """List the shards, or change their number while requests run.

    New shards take requests once each has a leader and a worker. Removed ones finish what they have.
    """
    with errors_explained(), quire.Client(address, connect_timeout_s=options.CONNECT_TIMEOUT_S) as client:
        if number is not None:
            taking = client.set_shards(number)
            later = "" if taking == number else f"; {number} will when each new one has a leader and a worker"
            out.print(f"{taking} take new requests{later}", markup=False)
            return
        client.health()  # raises if no server answers; for a client that means one shard
        found = client.shards()
    table = Table(
        "shard", "leader", "workers", "running", "waiting", "new requests", box=None, padding=(0, 3, 0, 0),
        header_style="dim",
    )  # fmt: skip
    for each in found:
        takes = "yes" if each.takes_requests else "no"
        counts = (each.num_workers, each.num_running, each.num_waiting)
        table.add_row(str(each.number), escape(each.leader or "none"), *map(str, counts), takes)
    out.print(table)
