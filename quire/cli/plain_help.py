"""Help of the commands as plain text: names of options are whole however narrow the terminal is.

Knows no command and no option.
"""

from typing import Any

from typer.core import TyperCommand, TyperGroup


class PlainCommand(TyperCommand):
    """A command with plain help, its options in the sections that they name as their panels."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        _write(self, ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        _write_parameters(self, ctx, formatter)


class PlainGroup(TyperGroup):
    """A group of commands with plain help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        _write(self, ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write options and commands."""
        _write_parameters(self, ctx, formatter)
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(each)) for name, each in commands if each is not None])


def _write(command: Any, ctx: Any, formatter: Any) -> None:
    for write in (command.format_usage, command.format_help_text, command.format_options, command.format_epilog):
        write(ctx, formatter)


def _write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    sections: dict[str, list[tuple[str, str]]] = {}
    for each in command.get_params(ctx):
        if (record := each.get_help_record(ctx)) is not None:
            plain = "Arguments" if each.param_type_name == "argument" else "Options"
            sections.setdefault(getattr(each, "rich_help_panel", None) or plain, []).append(record)
    for title, records in sections.items():
        with formatter.section(title):
            formatter.write_dl(records)


def _summary(command: Any) -> str:
    """The first paragraph of a command's help."""
    return " ".join((command.help or "").split("\n\n")[0].split())
