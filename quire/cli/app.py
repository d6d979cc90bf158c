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
from quire.variables import check_client_variables

# Its module differs by typer's version.
_USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[1]
_WANTS_HELP = "NoArgsIsHelpError"  # the one of a group without a command, whose message is its help

# Words of pydantic within typer's messages, and those of a person.
_WANTED = {"Input should be a valid integer": "give a whole number", "Input should be a valid number": "give a number"}
_TEXTS = ("prompt", "text")  # arguments that are texts, of which the shell makes several without quotes

# Errors of writing to a file, pipe or terminal that cannot take the output.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)

app = typer.Typer(
    name="quire",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # those of all commands
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quire {version('quire-llm')}")
        raise typer.Exit


@app.callback()
def quire(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serve a language model, and use one that is served."""
    if context.invoked_subcommand != "serve":  # which knows the variables of services, too
        try:
            check_client_variables(os.environ)
        except ValueError as error:
            raise _USAGE_ERROR(str(error)) from error


def run() -> None:
    """Runs the given command and ends the process; a mistyped command is one line and exit code 2."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
        raise SystemExit(code)
    except _USAGE_ERROR as error:
        if type(error).__name__ == _WANTS_HELP:
            sys.stdout.write(f"{error.format_message()}\n")
        else:
            sys.stderr.write(f"quire: {_message(error)}\n")
        raise SystemExit(2) from None
    except (typer.Abort, KeyboardInterrupt):
        raise SystemExit(EXIT_INTERRUPTED) from None
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        _give_up_output(error)
        raise SystemExit(EXIT_FAILED) from None


def _message(error: Any) -> str:
    """The message of a mistyped command, with what to give instead where that is known."""
    option = getattr(error, "option_name", None)
    is_served = error.ctx is not None and error.ctx.info_name == "serve"
    return (instead_of(option) if option and is_served else None) or _in_our_words(
        str(error.format_message()), error.ctx
    )


def _in_our_words(message: str, context: Any) -> str:
    """A message of typer, shorter or with a hint."""
    if message.startswith("No such command 'help'."):
        return f"`{context.command_path} --help` lists the commands"
    if message.startswith("No such command") and "Did you mean" not in message:
        return f"{message} `{context.command_path} --help` lists the commands"
    if message.startswith("Got unexpected extra argument"):
        takes_text = any(each.name in _TEXTS for each in context.command.params)
        return f"{message}{'; put a text of several words in quotes' if takes_text else ''}"
    for words, wanted in _WANTED.items():
        before, found, _ = message.partition(words)
        if found:
            return before + wanted
    return message


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
