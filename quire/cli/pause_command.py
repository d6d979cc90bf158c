"""`quire pause` and `quire resume`: takes a request off its worker for a while, and continues it."""

from typing import Annotated

import typer

import quire
from quire.cli import options
from quire.cli.output import errors_explained, out
from quire.params import DEFAULT_ADDRESS

RequestId = Annotated[str, typer.Argument(help="Id of the request.")]


def pause(
    request_id: RequestId,
    address: options.Address = DEFAULT_ADDRESS,
    tokens_only: Annotated[
        bool,
        typer.Option(
            "--tokens-only",
            help="Keep only its tokens; by default its KV is kept too, if the worker's host pool has room.",
        ),
    ] = False,
) -> None:
    """Pause a request: free its memory until it is resumed."""
    with errors_explained(), quire.Client(address, connect_timeout_s=options.CONNECT_TIMEOUT_S) as client:
        state = client.pause(request_id, "tokens" if tokens_only else "auto")
    out.print(f"{request_id}: {state.value}", markup=False)


def resume(request_id: RequestId, address: options.Address = DEFAULT_ADDRESS) -> None:
    """Resume a paused request exactly where it was."""
    with errors_explained(), quire.Client(address, connect_timeout_s=options.CONNECT_TIMEOUT_S) as client:
        state = client.resume(request_id)
    out.print(f"{request_id}: {state.value}", markup=False)
