"""The commands, put together, and how what is typed wrongly is told."""

import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer

from quire.cli.command_table import CommandGroup
from quire.cli.output import EXIT_INTERRUPTED

# Which module has it differs by typer's version.
_USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="quire",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quire {version('quire-llm')}")
        raise typer.Exit


@app.callback()
def quire(
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serve a language model, and talk to one that is served."""


def run() -> None:
    """Runs the command that was typed, and ends the process; what is typed wrongly is one line and exit code 2."""
    try:
        raise SystemExit(app(standalone_mode=False))
    except _USAGE_ERROR as error:
        if not sys.argv[1:] or not error.args:
            error.show()
        else:
            sys.stderr.write(f"quire: {error.format_message()}\n")
        raise SystemExit(2) from None
    except typer.Abort:
        raise SystemExit(EXIT_INTERRUPTED) from None
