"""`quire pause` and `quire resume`: a request off its worker for a while, and on again."""

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
        bool, typer.Option("--tokens-only", help="Keep its tokens alone; else its memory too, if the host has room.")
    ] = False,
) -> None:
    """Take a request off its worker until it is resumed."""
    with errors_explained(), quire.Client(address, connect_timeout_s=options.CONNECT_TIMEOUT_S) as client:
        state = client.pause(request_id, "tokens" if tokens_only else "auto")
    out.print(f"{request_id}: {state.value}", markup=False)


def resume(request_id: RequestId, address: options.Address = DEFAULT_ADDRESS) -> None:
    """Let a paused request go on exactly where it was."""
    with errors_explained(), quire.Client(address, connect_timeout_s=options.CONNECT_TIMEOUT_S) as client:
        state = client.resume(request_id)
    out.print(f"{request_id}: {state.value}", markup=False)
