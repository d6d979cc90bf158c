"""`quire health`: the health of a service as an exit code; the health check of the containers."""

from typing import Annotated

import typer

import quire
from quire.cli import options
from quire.cli.flags import name_field
from quire.cli.output import EXIT_FAILED, errors_explained, out
from quire.connection import INFERENCE_SERVICE, JOURNAL_SERVICE
from quire.params import DEFAULT_ADDRESS


def health(
    context: typer.Context,
    where: Annotated[
        str | None, typer.Argument(metavar="ADDRESS", help="Server to ask; the same as --address.")
    ] = None,
    address: options.Address = DEFAULT_ADDRESS,
    service: Annotated[
        str, typer.Option(help='Full name of the service; "" is the whole process.')
    ] = INFERENCE_SERVICE,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Longest wait for an answer, in seconds.")] = 3.0,
) -> None:
    """Check that the server can serve: exit code 0 if it can, 1 if not.

    DEGRADED is 0: the journal's store does not answer. Running requests go on; new ones are refused until it answers.
    """
    if where is not None and where != address and options.is_typed(context, "address"):
        raise typer.BadParameter(f"the address is given as {where} and as --address {address}: give it only once")
    address = address if where is None else where
    name_field("connect_timeout_s", "--timeout-s")
    with errors_explained(), quire.Client(address, connect_timeout_s=timeout_s) as client:
        answer = client.health(service)
        is_degraded = service == INFERENCE_SERVICE and answer is quire.Health.SERVING and _is_degraded(client)
    out.print(f"{service or address}: {'DEGRADED' if is_degraded else answer.value}", markup=False)
    if answer is not quire.Health.SERVING:
        raise typer.Exit(EXIT_FAILED)


def _is_degraded(client: quire.Client) -> bool:
    """True if the server reports that its journal's store does not answer; older servers do not report it."""
    try:
        return client.health(JOURNAL_SERVICE) is quire.Health.NOT_SERVING
    except quire.NotFoundError:
        return False
