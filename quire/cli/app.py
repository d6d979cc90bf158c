"""The command line: its commands, and errors for mistyped ones."""

import errno
import os
import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer

from quire.cli.command_table import CommandGroup
from quire.cli.output import EXIT_FAILED, EXIT_INTERRUPTED
from quire.cli.vllm_options import instead_of

# Its module differs by typer's version.
_USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[1]

# Errors of writing to a file, pipe or terminal that cannot take the output.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)

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
    """Serve a language model, and use one that is served."""


def run() -> None:
    """Runs the given command and ends the process; a mistyped command is one line and exit code 2."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
        raise SystemExit(code)
    except _USAGE_ERROR as error:
        message = _message(error)
        if message:  # a group without a command has printed its help
            sys.stderr.write(f"quire: {message}\n")
        raise SystemExit(2) from None
    except (typer.Abort, KeyboardInterrupt):
        raise SystemExit(EXIT_INTERRUPTED) from None
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        _give_up_output(error)
        raise SystemExit(EXIT_FAILED) from None


def _message(error: Any) -> str:
    """The message of a mistyped command; of an option that only `vllm serve` has it says what to give instead."""
    option = getattr(error, "option_name", None)
    is_served = error.ctx is not None and error.ctx.info_name == "serve"
    return (instead_of(option) if option and is_served else None) or str(error.format_message())


def _give_up_output(error: OSError) -> None:
    """Reports output that could not be written, unless its reader has left; drops the rest of it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    try:
        if error.errno != errno.EPIPE:
            sys.stderr.write(f"quire: the output could not be written: {error.strerror}\n")
            sys.stderr.flush()
    except OSError:
        os.dup2(null, sys.stderr.fileno())
