"""Base of every process's settings: flag, `QUIRE_…` variable or TOML file, in this order of precedence.

A process's `__main__` reads them once; nothing else looks at the environment.
"""

import json
import os
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

S = TypeVar("S", bound="Settings")


class Settings(BaseSettings):
    """Frozen settings of one process. `section` is its table in the TOML file named by `QUIRE_CONFIG`."""

    section: ClassVar[str]
    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
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
        path = os.environ.get("QUIRE_CONFIG")
        if path is None:
            return init_settings, env_settings
        table = _SectionSource(settings_cls, Path(path), cls.section)
        return init_settings, env_settings, table


class _SectionSource(TomlConfigSettingsSource):
    """One table of a TOML file."""

    def __init__(self, settings_cls: type[BaseSettings], path: Path, section: str) -> None:
        self._section = section
        if not path.is_file():
            raise FileNotFoundError(f"QUIRE_CONFIG names {path}, which is not a file")
        super().__init__(settings_cls, path)

    def _read_file(self, file_path: Path | Traversable) -> dict[str, Any]:
        table = super()._read_file(file_path).get(self._section, {})
        return dict(table)


def parse(kind: type[S], arguments: list[str]) -> S:
    """Settles settings from command-line flags over everything else.

    Raises ValueError with one sentence; argparse's own exit with code 2 is left to it.
    """
    try:
        return CliApp.run(kind, cli_args=arguments)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, each['loc'])) or 'settings'}: {each['msg']}" for each in error.errors()]
        raise ValueError(f"{'; '.join(wrong)} (see --help)") from error
    except (SettingsError, OSError) as error:
        raise ValueError(str(error)) from error


def to_toml(settings: Settings) -> str:
    """The settled settings as the TOML table that would set them; what is None is left out."""
    values = settings.model_dump(mode="json", exclude={"print_config", "parent_pipe_fd"}, exclude_none=True)
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]  # a JSON scalar is a TOML scalar
    return "\n".join([f"[{settings.section}]", *lines])
