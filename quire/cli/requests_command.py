"""`quire requests`, `cancel`, `pause` and `resume`: lists the requests that have not ended, and acts on some."""

import dataclasses
import json
import sys
from typing import Annotated

import typer

import quire
from quire.cli import options
from quire.cli.oldest_requests import oldest_requests
from quire.cli.output import EXIT_FAILED, EXIT_USAGE, err, errors_explained, fail, out, print_listing
from quire.params import DEFAULT_ADDRESS

COLUMNS = ("request", "tenant", "state", "prompt", "output", "n", "priority", "age", "worker", "waiting for")

RequestId = Annotated[str, typer.Argument(help="Id of the request.")]


def requests(
    address: options.Address = DEFAULT_ADDRESS,
    tenant: Annotated[str | None, typer.Option(help="Only requests of this tenant. Default: all tenants.")] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Only requests in this state: {', '.join(each.value for each in quire.LiveState)}. Repeatable."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="List at most this many, the oldest first.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List the requests that have not ended, the oldest first, and what each waits for."""
    unknown = [each for each in state or () if each not in [known.value for known in quire.LiveState]]
    if unknown:
        choices = ", ".join(each.value for each in quire.LiveState)
        fail(f"--state cannot be {unknown[0]!r}: give one of {choices}", EXIT_USAGE)
    with errors_explained(), quire.Client(address, connect_timeout_s=options.CONNECT_TIMEOUT_S) as client:
        found, has_more = oldest_requests(client, limit, tenant, state)
    if as_json:
        for each in found:
            sys.stdout.write(json.dumps({**dataclasses.asdict(each), "state": each.state.value}) + "\n")
    elif found:
        print_listing(COLUMNS, [_cells(each) for each in found])
    else:
        out.print(
            "no request is running or waiting"
            if tenant is None and not state
            else "no request that is running or waiting matches"
        )
    if has_more:
        err.print(f"there are more requests; raise --limit, which is {limit}", style="dim", markup=False)


def cancel(
    request_ids: Annotated[list[str], typer.Argument(help="Ids of the requests.", metavar="ID")],
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Cancel requests. One that has ended stays as it is; the exit code is 1 if any is unknown."""
    is_whole = True
    with errors_explained(), quire.Client(address, connect_timeout_s=options.CONNECT_TIMEOUT_S) as client:
        for request_id in request_ids:
            try:
                state = client.cancel(request_id)
            except quire.NotFoundError as error:
                err.print(f"quire: {error.message}", markup=False)
                is_whole = False
            else:
                out.print(f"{request_id}: {state.value}", markup=False)
    if not is_whole:
        raise typer.Exit(EXIT_FAILED)


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


def age(seconds: float) -> str:
    """An age as text: 4.2 s, 3 min, 5 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.0f} h"


def _cells(request: quire.RequestSummary) -> tuple[str, ...]:
    several = str(request.num_samples) if request.num_samples > 1 else ""
    return (
        request.request_id,
        request.tenant,
        request.state.value,
        str(request.prompt_tokens),
        str(request.output_tokens),
        f"beam {request.beam_width}" if request.beam_width is not None else several,
        str(request.priority) if request.priority else "",
        age(request.age_s),
        request.worker_id or "",
        request.waiting_for or "",
    )
