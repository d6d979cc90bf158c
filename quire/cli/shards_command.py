"""`quire shards`: lists the shards, and changes their number while requests run."""

from typing import Annotated

import typer

import quire
from quire.cli import options
from quire.cli.flags import name_field
from quire.cli.output import errors_explained, out, print_listing
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
            name_field("num_shards", "N")
            taking = client.set_shards(number)
            later = "" if taking == number else f"; {number} will when each new one has a leader and a worker"
            noun = "shard takes" if taking == 1 else "shards take"
            out.print(f"{taking} {noun} new requests{later}", markup=False)
            return
        client.health()  # raises if no server answers; for a client that means one shard
        found = client.shards()
    rows = [
        (
            *(str(each.number), each.leader or "none"),
            *map(str, (each.num_workers, each.num_running, each.num_waiting)),
            "yes" if each.takes_requests else "no",
        )
        for each in found
    ]
    print_listing(("shard", "leader", "workers", "running", "waiting", "new requests"), rows)
