"""Settings of `quire serve`, and the folder where a deployment of one machine keeps its things."""

import os
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import AliasChoices, Field
from pydantic_settings import SettingsConfigDict

from common.settings import Settings


class ServeSettings(Settings):
    """What to serve and how. What only a service needs to know can stand in its own table of the same file."""

    section: ClassVar[str] = "serve"
    model_config = SettingsConfigDict(env_prefix="QUIRE_SERVE_", populate_by_name=True)

    model: str = Field(min_length=1, description="folder of a checkpoint, or its id on the hub")
    listen: str = Field("127.0.0.1:7847", pattern=r"^.+:\d{1,5}$", description="address to serve on")
    workers: int = Field(1, ge=1, le=64, description="worker processes")
    data_dir: Path | None = Field(None, description="where journal and logs are kept")
    store: Literal["auto", "embedded", "memory"] = Field("auto", description="where the journal lives without a URL")
    redis_url: str | None = Field(
        None,
        validation_alias=AliasChoices("redis_url", "QUIRE_SERVE_REDIS_URL", "REDIS_URL"),
        pattern=r"^(rediss?|unix)://",
        description="Redis or Valkey to use",
    )
    num_blocks: int | None = Field(None, ge=1)
    kv_memory_fraction: float | None = Field(None, gt=0, le=1)
    block_size: int | None = Field(None, ge=1)
    dtype: str | None = None
    device: str | None = None
    threads: int | None = Field(None, ge=1)
    max_num_seqs: int | None = Field(None, ge=1)
    max_batched_tokens: int | None = Field(None, ge=1)
    max_model_len: int | None = Field(None, ge=1)
    pipeline_depth: int | None = Field(None, ge=1, le=2)
    max_queue: int | None = Field(None, ge=1)
    drain_timeout_s: float = Field(30.0, ge=0, description="how long running requests may go on at the end")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    verbose: bool = False

    @property
    def folder(self) -> Path:
        """The data folder in force."""
        return (self.data_dir or _default_data_dir()).expanduser().absolute()

    def scheduler_flags(self) -> list[str]:
        """What the scheduler is told beside address and store."""
        return _flags(
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            pipeline_depth=self.pipeline_depth,
            max_queue_requests=self.max_queue,
            drain_timeout_s=self.drain_timeout_s,
            log_level=self.log_level,
        )

    def worker_flags(self) -> list[str]:
        """What a worker is told beside model and address."""
        return _flags(
            num_blocks=self.num_blocks,
            kv_memory_fraction=self.kv_memory_fraction,
            block_size=self.block_size,
            dtype=self.dtype,
            device=self.device,
            threads=self.threads or share_of_cores(_num_cores(), self.workers),
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            max_model_len=self.max_model_len,
            log_level=self.log_level,
        )


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
