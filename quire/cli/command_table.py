"""The commands by name, each imported at its first use, so that a command does not load the others."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, cast

import typer

from quire.cli.flags import Command
from quire.cli.plain_help import PlainGroup

# In the order of --help, with the module that has the function or group of commands.
_MODULES = {
    "serve": "serve_command",
    "generate": "generate_command",
    "chat": "chat_command",
    "health": "health_command",
    "bench": "bench_command",
    "top": "top_command",
    "requests": "requests_command",
    "cancel": "requests_command",
    "pause": "requests_command",
    "resume": "requests_command",
    "prefix": "prefix_command",
    "workers": "workers_command",
    "shards": "shards_command",
}


class CommandTable(Mapping[str, Any]):
    """The commands of a group, imported when they are looked up."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Import a command. Raises KeyError for an unknown name."""
        if name not in self._loaded:
            found = getattr(import_module(f"quire.cli.{_MODULES[name]}"), name)
            self._loaded[name] = command = typer.main.get_command(_alone(found))
            command.name = name
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


class CommandGroup(PlainGroup):
    """The group of all commands."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = cast(Any, CommandTable())


def _alone(found: Any) -> typer.Typer:
    """An application of one command, or of the commands of a group."""
    if isinstance(found, typer.Typer):
        return found
    application = typer.Typer(add_completion=False)
    application.command(cls=Command)(found)
    return application
