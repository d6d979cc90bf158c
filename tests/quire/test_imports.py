"""Modules that importing the SDK loads: none until it is used, then grpcio and protobuf; and those that a refusal
loads.
"""

import ast
import importlib
import json
import pydoc
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import quire
from quire import public

HEAVY = ["torch", "transformers", "redis", "pydantic", "typer", "rich", "structlog", "tokenizers", "numpy", "jinja2"]
OURS = ["scheduler_svc", "worker_svc", "kernels"]


def modules_after(statement: str) -> set[str]:
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout))


def test_the_sdk_needs_only_the_base_install() -> None:
    loaded = modules_after("import quire; quire.Client")
    assert "grpc" in loaded
    assert not loaded.intersection(HEAVY + OURS)


def test_importing_the_sdk_loads_nothing_until_it_is_used() -> None:
    assert not modules_after("import quire").intersection(["grpc", "google.protobuf", "asyncio", "quire.client"])
    assert "grpc" not in modules_after("from quire import machine")


def test_the_sdk_has_its_public_names_and_no_others() -> None:
    for name in public.__all__:
        assert getattr(quire, name) is getattr(public, name)
        assert not isinstance(getattr(quire, name), type) or getattr(quire, name).__module__ == "quire"
    assert set(public.__all__) <= set(dir(quire))
    taken: dict[str, object] = {}
    exec("from quire import *", taken)
    assert set(public.__all__) <= set(taken)
    assert quire.errors is importlib.import_module("quire.errors")
    for name in ("Clinet", "no.module", "_private", "__wrapped__"):
        with pytest.raises(AttributeError, match=re.escape(name)):
            getattr(quire, name)


def trees_of_public_modules() -> dict[str, ast.Module]:
    """Syntax trees of the modules that define public names, by the name of the module."""
    imports = ast.parse(Path(public.__file__).read_text()).body
    modules = [each.module for each in imports if isinstance(each, ast.ImportFrom) and each.module]
    return {each: ast.parse(Path(f"{each.replace('.', '/')}.py").read_text()) for each in modules}


def names_in_signatures(public_class: ast.ClassDef) -> set[str]:
    """Names in the annotations of what users call and read: fields, `__init__` and public methods."""
    annotations: list[ast.expr | None] = []
    for each in public_class.body:
        if isinstance(each, ast.AnnAssign):
            annotations.append(each.annotation)
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and not re.match("_(?!_init__)", each.name):
            arguments = [*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs]
            annotations += [each.returns, *(argument.annotation for argument in arguments)]
    nodes = (node for each in annotations if each is not None for node in ast.walk(each))
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def test_every_type_of_ours_in_a_public_signature_has_a_public_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(public.__file__).parents[1])
    nodes = [node for tree in trees_of_public_modules().values() for node in tree.body]
    aliases = {each.targets[0] for each in nodes if isinstance(each, ast.Assign)}
    types = {each.id for each in aliases if isinstance(each, ast.Name) and each.id[0].isupper()}
    classes = {each.name: each for each in nodes if isinstance(each, ast.ClassDef)}
    used = {name for each in public.__all__ if each in classes for name in names_in_signatures(classes[each])}
    assert "Messages" in used and "PinnedPrefix" in used
    not_for_users = {"T", "Ts", "Answer", "LoopThread"}  # type variables, and what a client makes its streams of
    assert used & (types | set(classes)) - not_for_users <= set(public.__all__)


def test_the_version_is_that_of_the_package_and_loads_nothing_else() -> None:
    assert quire.__version__ == version("quire-llm") and "__version__" in dir(quire)
    assert "grpc" not in modules_after("import quire; quire.__version__")
    missing = "import quire, importlib.metadata as m\ndef version(name): raise m.PackageNotFoundError(name)"
    assert modules_after(f"{missing}\nm.version = version\nassert not hasattr(quire, '__version__')")


def test_help_shows_the_sdk() -> None:
    shown = pydoc.plain(pydoc.render_doc("quire"))
    assert "class AsyncClient(" in shown and "class OverloadedError(" in shown


def test_a_type_checker_knows_the_names_of_the_sdk(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text("import quire\nreveal_type(quire.Client().generate)\nquire.Clinet\n")
    flags = ["--no-error-summary", f"--cache-dir={tmp_path / 'cache'}", "--follow-imports=silent"]
    command = [sys.executable, "-m", "mypy", *flags, str(tmp_path / "user.py")]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    assert "quire.results.Completion" in said[0], said
    assert len(said) == 2 and '"Clinet"' in said[1], said


@pytest.mark.parametrize("arguments", [["--dtype", "fp16", "x"], ["--no-such-option"], ["--listen", "nowhere", "x"]])
def test_quire_serve_refuses_without_having_loaded_the_sdk_or_other_commands(arguments: list[str]) -> None:
    run = f"import sys; sys.argv[1:] = {['serve', *arguments]}; from quire.cli.__main__ import main"
    loaded = modules_after(f"{run}\ntry: main()\nexcept SystemExit as end: assert end.code == 2")
    assert not loaded.intersection(["grpc", "google.protobuf", "rich.progress", "quire.cli.bench_command", "torch"])


def test_the_check_of_a_model_loads_no_more_than_it_needs() -> None:
    loaded = modules_after("import worker_svc.start.preflight_process")
    assert not loaded.intersection(["torch", "numpy", "pydantic", "grpc", "google.protobuf", "asyncio", "structlog"])


def test_the_command_line_has_neither_torch_nor_redis_nor_the_services() -> None:
    loaded = modules_after("from quire.cli.command_table import CommandTable; dict(CommandTable())")
    assert "typer" in loaded
    assert not loaded.intersection(["torch", "redis", "transformers", *OURS])
