"""Base of every process's settings: flag, `QUIRE_…` variable or TOML file, in this order of precedence.

A process's `__main__` reads them once; nothing else looks at the environment. A misspelt flag, variable or key is
refused with the nearest right name.
"""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliApp, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from quire.redaction import without_passwords
from quire.typed_names import as_typed, flag_of

S = TypeVar("S", bound="Settings")

CONFIG_VARIABLE = "QUIRE_CONFIG"
# For starting a process.
INTERNAL = frozenset({"check", "gives_way", "log_file", "parent_pipe_fd", "print_config", "status_fd"})
TABLES = ("serve", "scheduler", "worker", "gateway")
# Variables that Kubernetes sets in each pod for services called quire-worker and the like.
_LINKS = re.compile(r"SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?")
# What to give instead of a value that cannot be read, where pydantic's words are those of a program.
_WANTED = {
    "int_parsing": "give a whole number",
    "int_from_float": "give a whole number",
    "float_parsing": "give a number",
    "bool_parsing": "give true or false",
}
KEY_ON_COMMAND_LINE = "give API keys by --api-key-file or QUIRE_API_KEY: everybody may read a command line"


class Settings(BaseSettings):
    """Frozen settings of one process. `section` is its table in the TOML file named by `QUIRE_CONFIG`.

    An empty variable counts as not set.
    """

    section: ClassVar[str]
    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_ignore_empty=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
        protected_namespaces=(),
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Adds the TOML table below the environment."""
        path = os.environ.get(CONFIG_VARIABLE)
        if not path:
            return init_settings, env_settings
        table = read_tables(Path(path)).get(cls.section, {})
        return init_settings, env_settings, _TableSource(settings_cls, table)

    @classmethod
    def prefix(cls) -> str:
        """Prefix of its variables."""
        return str(cls.model_config["env_prefix"])


class _TableSource(PydanticBaseSettingsSource):
    """One table of the TOML file."""

    def __init__(self, settings_cls: type[BaseSettings], table: dict[str, Any]) -> None:
        super().__init__(settings_cls)
        self._table = table

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return self._table.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self._table


def read_tables(config: Path) -> dict[str, dict[str, Any]]:
    """The tables of a settings file.

    Raises ValueError if there is no file, if it is no TOML, or if it has a table that no process reads.
    """
    try:
        if config.is_dir():
            raise ValueError(f"{config} is a folder; name the settings file in it")
        if not config.is_file():
            raise ValueError(f"there is no settings file {config}; name one that exists, or leave it out")
        text = config.read_bytes()
    except OSError as error:
        raise ValueError(f"the settings file {config} cannot be read: {error.strerror}") from error
    try:
        tables = tomllib.loads(text.decode())
    except ValueError as error:  # also what is no UTF-8
        raise ValueError(f"{config} is not valid TOML: {error}") from error
    for name, table in tables.items():
        if name not in TABLES or not isinstance(table, dict):
            raise ValueError(f"{config}: there is no table {name!r}; use [serve], [scheduler], [worker] and [gateway]")
    return tables


def parse(kind: type[S], arguments: list[str]) -> S:
    """Settings of a process; command-line flags win over all other sources.

    Raises ValueError with one sentence; --help is left to argparse, which ends the process.
    """
    check_variables(os.environ, kind.prefix(), kind.model_fields)
    try:
        return CliApp.run(kind, cli_args=arguments)
    except ValidationError as error:
        raise ValueError(
            f"{explain_errors(error.errors(), kind, names_given(kind, arguments))} (see --help)"
        ) from error
    except (SettingsError, OSError) as error:
        raise ValueError(_argument_error(str(error), kind)) from error


def settle(kind: type[S], given: Mapping[str, Any], named: Mapping[str, str]) -> S:
    """Settings from given values, which win over the kind's own variables and table of the file.

    Args:
        kind: class of the settings.
        given: values by the names of fields.
        named: names of the given settings in errors, by field.

    Raises:
        ValueError: with one sentence.
    """
    check_variables(os.environ, kind.prefix(), kind.model_fields)
    try:
        return kind(**given)
    except ValidationError as error:
        raise ValueError(explain_errors(error.errors(), kind, {**names_given(kind), **named})) from error


def names_given(kind: type[Settings], arguments: Sequence[str] = ()) -> dict[str, str]:
    """Name under which each setting was given, by field: a flag, a variable, or a key of the file.

    Raises ValueError for a file that cannot be read.
    """
    config = os.environ.get(CONFIG_VARIABLE)
    table = read_tables(Path(config)).get(kind.section, {}) if config else {}
    names = {name: f"[{kind.section}] {name}" for name in table}
    prefix = kind.prefix().lower()
    for variable, value in os.environ.items():
        if value and variable.lower().startswith(prefix):  # in either case, as pydantic reads them
            names[variable.lower().removeprefix(prefix)] = variable
    return names | _flags_of(arguments)


def check_variables(environment: Mapping[str, str], prefix: str, names: Collection[str]) -> None:
    """Raises ValueError if a variable has the prefix and none of the names."""
    for variable, value in sorted(environment.items()):
        name = variable.removeprefix(prefix)
        is_port = name == "PORT" and "://" not in value  # a person's, not a link's
        if not variable.startswith(prefix) or name.lower() in names or (_LINKS.fullmatch(name) and not is_port):
            continue
        near = nearest(name.lower(), names)
        hint = f"; did you mean {prefix}{near.upper()}?" if near else "; unset it"
        if is_port:
            addresses = " and ".join(f"{prefix}{each.upper()}" for each in ("listen", "http") if each in names)
            hint = f": a port is a part of {addresses}, host:port"
        raise ValueError(f"{variable} is not a setting of Quire{hint}")


def nearest(name: str, names: Collection[str]) -> str | None:
    """The known name closest to a misspelt one; None if none is close."""
    found = difflib.get_close_matches(name, [each for each in names if each not in INTERNAL], n=1)
    return found[0] if found else None


def explain_errors(errors: Sequence[ErrorDetails], kind: type[Settings], named: Mapping[str, str]) -> str:
    """Description of bad settings, each by the name under which it was given."""
    return "; ".join(_explain_error(each, kind, named) for each in errors)


def _explain_error(error: ErrorDetails, kind: type[Settings], named: Mapping[str, str]) -> str:
    if not error["loc"]:
        return as_typed(error["msg"].removeprefix("Value error, "), named)
    name = str(error["loc"][0]).lower()
    if error["type"] == "extra_forbidden":
        near = nearest(name, kind.model_fields)
        return f"[{kind.section}] has no setting {name!r}" + (f"; did you mean {near!r}?" if near else "")
    if error["type"] == "missing":
        return f"{flag_of(name)} is missing"
    label = named.get(name) or flag_of(name)
    if error["type"] == "string_pattern_mismatch" and "pattern" in error["msg"]:  # which is for programs
        shown = without_passwords(repr(error["input"]))
        return f"{label}: {shown} does not fit: {kind.model_fields[name].description}"
    return f"{label}: {sentence(error)}"


def sentence(error: ErrorDetails) -> str:
    """Description of one bad value, which is shown without its password."""
    message = _WANTED.get(error["type"]) or error["msg"].removeprefix("Value error, ")
    shown = without_passwords(repr(error["input"]))
    is_shown = shown in message or (error["type"] == "value_error" and f" {error['input']} " in f"{message} ")
    return message if is_shown else f"{message}, not {shown}"


def _flags_of(arguments: Sequence[str]) -> dict[str, str]:
    flags = [each.partition("=")[0] for each in arguments if each.startswith("--")]
    return {flag[2:].replace("-", "_"): flag for flag in flags}


def _argument_error(message: str, kind: type[Settings]) -> str:
    """The message of argparse without its prefix, and with the nearest flag."""
    message = message.removeprefix("error parsing CLI: ").strip()
    if re.search(r"--api-key(?![\w-])", message):
        return KEY_ON_COMMAND_LINE
    unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
    near = nearest(unknown[1][2:].replace("-", "_"), kind.model_fields) if unknown else None
    hint = f"; did you mean {flag_of(near)}?" if near else " (see --help)"
    return without_passwords(message) + hint


def to_toml(settings: Settings, exclude: Collection[str] = ()) -> str:
    """The settings as the TOML table that would set them; None values are left out.

    A value with a password is written as a comment, without the password.
    """
    values = settings.model_dump(mode="json", exclude={*INTERNAL, *exclude}, exclude_none=True)
    lines = []
    for name, value in values.items():
        line = f"{name} = {json.dumps(value)}"  # a JSON scalar is a TOML scalar
        shown = without_passwords(line)
        lines.append(line if shown == line else f"# {shown}")
    return "\n".join([f"[{settings.section}]", *lines])
