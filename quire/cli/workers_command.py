"""`quire workers`: lists the workers, and takes one out of service for a while or for good."""

from typing import Annotated

import typer

import quire
from quire.cli import options
from quire.cli.flags import Command
from quire.cli.output import errors_explained, out, print_listing
from quire.cli.plain_help import PlainGroup
from quire.params import DEFAULT_ADDRESS
from quire.stats import WorkerStats

workers = typer.Typer(cls=PlainGroup, help="List the workers, and take them out of service.", add_completion=False)


@workers.callback(invoke_without_command=True)
def show(context: typer.Context, address: options.Address = DEFAULT_ADDRESS) -> None:
    """List the workers, and take them out of service."""
    if context.invoked_subcommand is not None:
        return
    with errors_explained(), quire.Client(address, connect_timeout_s=options.CONNECT_TIMEOUT_S) as client:
        stats = client.stats()
    if not stats.workers:
        out.print("no worker is registered; start one with `quire serve` or `python -m worker_svc`")
        return
    print_listing(("worker", "address", "running", "blocks", "draining"), [_cells(each) for each in stats.workers])


def _cells(worker: WorkerStats) -> tuple[str, ...]:
    draining = f"out of service: {worker.out_of_service}" if worker.out_of_service else "no"
    return (
        worker.worker_id,
        worker.address,
        str(worker.num_running),
        f"{worker.blocks.used}/{worker.blocks.total}",
        "yes" if worker.draining else draining,
    )


@workers.command(cls=Command)
def drain(
    worker_id: Annotated[str, typer.Argument(help="Id of the worker, as `quire workers` lists it.", metavar="ID")],
    address: options.Address = DEFAULT_ADDRESS,
    undo: Annotated[bool, typer.Option("--undo", help="Take the worker back into service.")] = False,
) -> None:
    """Take a worker out of service: it gets nothing new and its requests move to other workers.

    It serves again after --undo, or when it is restarted.
    """
    what_to_do = "`quire workers` lists the registered ones"
    with errors_explained(what_to_do), quire.Client(address, connect_timeout_s=options.CONNECT_TIMEOUT_S) as client:
        num_running = client.drain_worker(worker_id, undo=undo)
    if undo:
        out.print(f"{worker_id}: in service", markup=False)
    else:
        out.print(f"{worker_id}: draining, {num_running} sequences still run there", markup=False)
