"""`quire prefix`: pinned prefixes, whose KV blocks are kept for the requests that begin with them."""

import sys
from typing import Annotated

import typer

import quire
from quire.cli import options
from quire.cli.flags import Command
from quire.cli.output import errors_explained, out, print_listing
from quire.cli.plain_help import PlainGroup
from quire.params import DEFAULT_ADDRESS

prefix = typer.Typer(
    cls=PlainGroup, no_args_is_help=True, help="Pin prefixes that many requests begin with.", add_completion=False
)

Name = Annotated[str, typer.Argument(help="Name of the pin: letters, digits and . _ : -")]


@prefix.command(cls=Command)
def pin(
    name: Name,
    text: Annotated[str, typer.Argument(help="The prefix; - reads it from standard input.")],
    address: options.Address = DEFAULT_ADDRESS,
    tenant: options.Tenant = None,
    cache_salt: options.CacheSalt = None,
) -> None:
    """Compute a prefix and keep its KV blocks: prompts that begin with it reuse them."""
    text = sys.stdin.read() if text == "-" else text
    with errors_explained(), quire.Client(address, connect_timeout_s=options.CONNECT_TIMEOUT_S) as client:
        pinned = client.pin_prefix(name, text, tenant=tenant, cache_salt=cache_salt)
    was = "" if pinned.created else " already"
    blocks = "1 block" if pinned.num_blocks == 1 else f"{pinned.num_blocks} blocks"
    out.print(f"{name}: {pinned.num_tokens} tokens in {blocks} are pinned{was}", markup=False)


@prefix.command(cls=Command)
def unpin(name: Name, address: options.Address = DEFAULT_ADDRESS, tenant: options.Tenant = None) -> None:
    """Unpin a prefix: its memory is freed when it is needed."""
    what_to_do = "`quire prefix list` lists the pinned prefixes of a tenant"
    with errors_explained(what_to_do), quire.Client(address, connect_timeout_s=options.CONNECT_TIMEOUT_S) as client:
        client.unpin_prefix(name, tenant=tenant)
    out.print(f"{name}: no longer pinned", markup=False)


@prefix.command("list", cls=Command)
def show(address: options.Address = DEFAULT_ADDRESS, tenant: options.Tenant = None) -> None:
    """List the pinned prefixes."""
    with errors_explained(), quire.Client(address, connect_timeout_s=options.CONNECT_TIMEOUT_S) as client:
        prefixes = client.list_prefixes(tenant=tenant)
    if not prefixes:
        out.print("no prefix is pinned")
        return
    rows = [
        (each.name, str(each.num_tokens), str(each.num_blocks), each.cache_salt, ", ".join(each.worker_ids))
        for each in prefixes
    ]
    print_listing(("name", "tokens", "blocks", "salt", "workers"), rows)
