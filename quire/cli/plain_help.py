"""Help of the commands as plain text: names of options are whole however narrow the terminal is.

Knows no command and no option.
"""

from typing import Any

from typer.core import TyperCommand, TyperGroup


class _PlainHelp:
    """Help as plain text, options in the sections that they name as their panels."""

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        for write in (self.format_usage, self.format_help_text, self.format_options, self.format_epilog):
            write(ctx, formatter)

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            if (record := each.get_help_record(ctx)) is not None:
                plain = "Arguments" if each.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(each, "rich_help_panel", None) or plain, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class PlainCommand(_PlainHelp, TyperCommand):
    """A command with plain help."""


class PlainGroup(_PlainHelp, TyperGroup):
    """A group of commands with plain help."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write options and commands."""
        super().format_options(ctx, formatter)
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(each)) for name, each in commands if each is not None])


def _summary(command: Any) -> str:
    """The first paragraph of a command's help."""
    return " ".join((command.help or "").split("\n\n")[0].split())
