"""The commands, put together."""

import typer

from quire.cli.bench_command import bench
from quire.cli.chat_command import chat
from quire.cli.generate_command import generate
from quire.cli.health_command import health
from quire.cli.serve_command import serve
from quire.cli.top_command import top

app = typer.Typer(
    name="quire",
    help="Serve a language model, and talk to one that is served.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (serve, generate, chat, health, bench, top):
    app.command()(command)
