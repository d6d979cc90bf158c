"""The commands, put together, and how what is typed wrongly is told."""

import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer

from quire.cli.bench_command import bench
from quire.cli.chat_command import chat
from quire.cli.flags import Command
from quire.cli.generate_command import generate
from quire.cli.health_command import health
from quire.cli.output import EXIT_INTERRUPTED
from quire.cli.pause_command import pause, resume
from quire.cli.prefix_command import prefix
from quire.cli.requests_command import cancel, requests
from quire.cli.serve_command import serve
from quire.cli.top_command import top
from quire.cli.workers_command import workers

# Which module has it differs by typer's version.
_USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="quire",
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


for command in (serve, generate, chat, health, bench, top, requests, cancel, pause, resume):
    app.command(cls=Command)(command)
app.add_typer(prefix, name="prefix")
app.add_typer(workers, name="workers")


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
