"""Options of `quire serve`, generated from the fields of its own settings and those of the services.

A new setting of a service becomes an option of `quire serve` by itself, with the same name and help. This file knows
how a field looks as an option, not what it means.
"""

import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from quire.cli.serve_settings import ALIASES, SERVICES, ServeSettings, passed_fields
from quire.scheduler_settings import SchedulerSettings
from quire.settings import Settings
from quire.typed_names import flag_of
from quire.worker_settings import WorkerSettings

_SHORT = {"verbose": "-v"}
_METAVARS = {int: "int", float: "float", str: "str", Path: "path"}  # as typer shows types


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give the command an option for each setting; options are passed by name, None where none was given."""
    own = inspect.signature(command)
    fixed = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(name, field, panel))
        for name, (field, panel) in _fields().items()
    ]
    command.__signature__ = own.replace(parameters=[*fixed, *added])  # type: ignore[attr-defined]
    command.__annotations__ = {**{each.name: each.annotation for each in (*fixed, *added)}, "return": None}
    return command


def _fields() -> dict[str, tuple[FieldInfo, str | None]]:
    """The field of each setting by its name, and the panel of --help that shows it."""
    fields: dict[str, tuple[FieldInfo, str | None]] = {
        name: (field, None) for name, field in ServeSettings.model_fields.items() if name != "model"
    }
    kinds: dict[str, list[type[Settings]]] = {}
    for kind in reversed(SERVICES):
        for name in passed_fields(kind):
            kinds.setdefault(name, []).append(kind)
    for name, several in kinds.items():
        panel = (
            "Scheduler and workers"
            if {SchedulerSettings, WorkerSettings} <= {*several}
            else several[-1].section.capitalize()
        )
        fields[name] = (several[-1].model_fields[name], panel)
    return fields


def _option(name: str, field: FieldInfo, panel: str | None) -> Any:
    flag = flag_of(name)
    kind = _plain_type(field.annotation)
    short = [_SHORT[name]] if name in _SHORT else []
    if kind is bool:
        names = [f"{flag}/--no-{flag[2:]}", *short]
        return Annotated[bool | None, typer.Option(*names, help=_help(field), rich_help_panel=panel)]
    names = [flag, *(flag_of(alias) for alias, meant in ALIASES.items() if meant == name), *short]
    return Annotated[str | None, typer.Option(*names, help=_help(field), metavar=_metavar(kind), rich_help_panel=panel)]


def _help(field: FieldInfo) -> str:
    text = (field.description or "").strip()
    text = text[:1].upper() + text[1:]
    default = field.default
    if default is None or default is PydanticUndefined:
        return f"{text}."
    shown = {True: "yes", False: "no"}[default] if isinstance(default, bool) else default
    return f"{text}. Default: {shown}."


def _plain_type(annotation: Any) -> Any:
    """The type of a field without None."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = [each for each in get_args(annotation) if each is not type(None)]
    return annotation


def _metavar(kind: Any) -> str:
    shown = "|".join(get_args(kind)) if get_origin(kind) is Literal else _METAVARS.get(kind, "str")
    return f"<{shown}>"
