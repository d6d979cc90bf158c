"""Settings of `quire serve`: what there is, how they are settled, and what the services are told of them."""

import difflib
import os
import tomllib
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import AliasChoices, Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import SettingsConfigDict

from quire.settings import Settings

TABLES = ("serve", "scheduler", "worker")
WORKER_THREADS = "QUIRE_WORKER_THREADS"  # with it, or in its table, a worker is told its threads past us
_HINTS = {
    "listen": "write host:port, such as 127.0.0.1:7847",
    "redis_url": "write redis://host:port/db, rediss://… or unix:///path/to/socket",
}


class ServeSettings(Settings):
    """What to serve and how. What only a service needs to know can stand in its own table of the same file."""

    section: ClassVar[str] = "serve"
    model_config = SettingsConfigDict(env_prefix="QUIRE_SERVE_", populate_by_name=True)

    model: str = Field(min_length=1, description="folder of a checkpoint, or its id on the hub")
    listen: str = Field("127.0.0.1:7847", pattern=r"^.+:\d{1,5}$", description="address to serve on")
    workers: int = Field(1, ge=1, le=64, description="worker processes")
    standby: bool = Field(False, description="run a second scheduler, which goes on at once when the first is gone")
    data_dir: Path | None = Field(None, description="where journal and logs are kept")
    store: Literal["auto", "embedded", "memory"] = Field("auto", description="where the journal lives without a URL")
    appendfsync: Literal["always", "everysec"] = Field("always", description="when the embedded store syncs its file")
    redis_url: str | None = Field(
        None,
        validation_alias=AliasChoices("redis_url", "QUIRE_SERVE_REDIS_URL", "REDIS_URL"),
        pattern=r"^(rediss?|unix)://",
        description="Redis or Valkey to use",
    )
    num_blocks: int | None = Field(None, ge=1)
    num_host_blocks: int | None = Field(None, ge=0)
    kv_memory_fraction: float | None = Field(None, gt=0, le=1)
    block_size: int | None = Field(None, ge=1)
    dtype: str | None = None
    device: str | None = None
    threads: int | None = Field(None, ge=1)
    max_num_seqs: int | None = Field(None, ge=1)
    max_batched_tokens: int | None = Field(None, ge=1)
    max_model_len: int | None = Field(None, ge=1)
    pipeline_depth: int | None = Field(None, ge=1, le=2)
    preemption: Literal["auto", "swap", "recompute"] | None = None
    order: Literal["fcfs", "edf"] | None = None
    max_queue: int | None = Field(None, ge=1)
    drain_timeout_s: float = Field(30.0, ge=0, description="how long running requests may go on at the end")
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    verbose: bool = False

    @property
    def folder(self) -> Path:
        """The data folder in force."""
        return (self.data_dir or _default_data_dir()).expanduser().absolute()

    def scheduler_flags(self) -> list[str]:
        """What the scheduler is told beside address and store."""
        standby = ["--standby"] if self.standby else []
        return standby + _flags(
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            pipeline_depth=self.pipeline_depth,
            preemption=self.preemption,
            order=self.order,
            max_queue_requests=self.max_queue,
            drain_timeout_s=self.drain_timeout_s,
            log_level=self.log_level,
        )

    def worker_flags(self) -> list[str]:
        """What a worker is told beside model and address."""
        return _flags(
            num_blocks=self.num_blocks,
            num_host_blocks=self.num_host_blocks,
            kv_memory_fraction=self.kv_memory_fraction,
            block_size=self.block_size,
            dtype=self.dtype,
            device=self.device,
            threads=self.threads,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            max_model_len=self.max_model_len,
            log_level=self.log_level,
        )


def settle(given: dict[str, Any], config: Path | None) -> ServeSettings:
    """Flags over environment over file. Raises ValueError, with one sentence, or OSError."""
    tables: dict[str, Any] = {}
    if config is not None:
        tables = _read_tables(config)
        os.environ["QUIRE_CONFIG"] = str(config.absolute())  # for the services too
    try:
        settings = ServeSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise ValueError("; ".join(_explained(each) for each in error.errors())) from error
    if settings.threads is None and "threads" not in tables.get("worker", {}) and WORKER_THREADS not in os.environ:
        return settings.model_copy(update={"threads": share_of_cores(_num_cores(), settings.workers)})
    return settings


def _read_tables(config: Path) -> dict[str, Any]:
    """Raises ValueError if the file is no TOML, or has what no process would read."""
    if not config.is_file():
        raise ValueError(f"there is no settings file {config}")
    try:
        tables = tomllib.loads(config.read_text())
    except ValueError as error:  # also what is no UTF-8
        raise ValueError(f"{config} is no TOML: {error}") from error
    for name, table in tables.items():
        if name not in TABLES or not isinstance(table, dict):
            raise ValueError(f"{config}: {name!r} is none of the tables [serve], [scheduler] and [worker]")
    return tables


def _explained(error: ErrorDetails) -> str:
    name = str(error["loc"][0]).lower() if error["loc"] else "settings"
    if name == "model" and error["type"] == "missing":
        return "say which model to serve: quire serve MODEL"
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, ServeSettings.model_fields, n=1)
        return f"[serve] has no setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    message = _HINTS.get(name, error["msg"])
    return f"--{name.replace('_', '-')}: {message}, not {error['input']!r}"


def share_of_cores(num_cores: int, num_workers: int) -> int:
    """Threads of one worker's computation: the cores but one, shared; the one is for scheduler and clients.

    A worker that computes on every core makes the scheduler wait for a core at each step, which costs more than
    the core gives.
    """
    return max(1, (num_cores - 1) // num_workers)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _default_data_dir() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "quire"


def _flags(**values: object) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]
