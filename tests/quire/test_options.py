"""No command ignores an option: each is used, at every place where it can be typed, or refused."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from quire.cli.app import app
from tests.quire.scripted_server import ScriptedServer
from tests.quire.test_cli import run

ELSEWHERE = "127.0.0.1:2"  # where nobody listens
NEVER_ASK = {"serve"}  # talks to no server


class Leaf(NamedTuple):
    """A command that does something, and the groups above it."""

    path: tuple[str, ...]
    groups: tuple[Any, ...]
    command: Any

    @property
    def arguments(self) -> list[str]:
        """Example value for each required argument."""
        return ["x" for each in self.command.params if each.param_type_name == "argument" and each.required]


def leaves(command: Any, path: tuple[str, ...] = (), groups: tuple[Any, ...] = ()) -> Iterator[Leaf]:
    """Walk all commands, and the groups that do something without a subcommand."""
    below = getattr(command, "commands", None)
    if below is None:
        yield Leaf(path, groups, command)
        return
    for name, each in below.items():
        yield from leaves(each, (*path, name), (*groups, command))


def test_help_shows_names_whole_in_a_narrow_terminal() -> None:
    for path, _, command in LEAVES:
        shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "50", "TERMINAL_WIDTH": "50"}).stdout
        for each in (each for each in command.params if each.param_type_name == "option"):
            for name in (*each.opts, *each.secondary_opts):
                assert f" {name}" in shown, (path, name)
        assert "…" not in shown


def test_help_tells_all_of_what_a_command_does() -> None:
    shown = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        assert f"{name} {' '.join(command.help.split(chr(10) * 2)[0].split())}" in shown


LEAVES = list(leaves(typer.main.get_command(app)))
NAMES = [" ".join(each.path) for each in LEAVES]


def typed(parameter: Any) -> bool:
    """True if it is an option of ours, not one like `--help` that ends the command."""
    return parameter.param_type_name == "option" and not parameter.is_eager


def group_options() -> list[Any]:
    return [
        pytest.param(leaf, depth, option, id=f"{' '.join(leaf.path)} {option.name}")
        for leaf in LEAVES
        for depth, group in enumerate(leaf.groups)
        for option in group.params
        if typed(option)
    ]


@pytest.mark.parametrize(("leaf", "depth", "option"), group_options())
def test_an_option_of_a_group_counts_for_each_of_its_commands(leaf: Leaf, depth: int, option: Any) -> None:
    value = None if option.is_flag else ELSEWHERE
    context = None
    for number, group in enumerate(leaf.groups):
        words = ([option.opts[0]] if value is None else [option.opts[0], value]) if number == depth else []
        context = group.make_context(leaf.path[number], [*words, "below"], parent=context)
    own = [each for each in leaf.command.params if each.name == option.name]
    assert own, f"{leaf.path} does not know {option.opts[0]} of its group"
    reached = leaf.command.make_context(leaf.path[-1], leaf.arguments, parent=context).params[option.name]
    assert reached == (True if value is None else value)


@pytest.mark.parametrize("leaf", LEAVES, ids=NAMES)
def test_an_address_counts_wherever_it_stands_whatever_the_environment_says(leaf: Leaf) -> None:
    if leaf.path[0] in NEVER_ASK:
        return
    places = [[*leaf.path, "--address", ELSEWHERE, *leaf.arguments]]
    if leaf.path == ("health",):
        places.append([*leaf.path, ELSEWHERE])  # as the health checks of the containers say it
    for depth, group in enumerate(leaf.groups):
        if any(each.name == "address" for each in group.params):
            places.append([*leaf.path[:depth], "--address", ELSEWHERE, *leaf.path[depth:], *leaf.arguments])
    for words in places:
        result = CliRunner().invoke(app, words, env={"QUIRE_ADDRESS": "127.0.0.1:1"}, input="text")
        assert (result.exit_code, ELSEWHERE in result.stderr) == (1, True), (words, result.output)


async def test_a_worker_is_drained_where_the_group_was_told_to_look(server: ScriptedServer) -> None:
    drained = await run("workers", "--address", server.address, "drain", "w0")
    assert (drained.exit_code, server.is_draining) == (0, True)
    twice = await run("workers", "--address", server.address, "drain", "w0", "--undo", "--address", ELSEWHERE)
    assert twice.exit_code == 2 and server.is_draining
    assert "give it only once" in twice.stderr


def functions(group: typer.Typer) -> Iterator[Callable[..., Any]]:
    """Functions behind each command and each group."""
    if group.registered_callback is not None and group.registered_callback.callback is not None:
        yield group.registered_callback.callback
    for command in group.registered_commands:
        assert command.callback is not None
        yield command.callback
    for below in group.registered_groups:
        assert below.typer_instance is not None
        yield from functions(below.typer_instance)


@pytest.mark.parametrize("function", list(functions(app)), ids=lambda each: f"{each.__module__}.{each.__name__}")
def test_every_option_of_a_command_is_read_by_it(function: Callable[..., Any]) -> None:
    function = inspect.unwrap(function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    read = {
        node.id
        for statement in tree.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    eager = {"show_version"}  # its callback has done everything
    assert set(inspect.signature(function).parameters) - eager <= read
