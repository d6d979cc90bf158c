"""Settings of the gateway process; in this package because `quire serve` takes, checks and prints them too."""

import re
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from quire.access_settings import AccessSettings
from quire.address import check_address, check_listen_address
from quire.params import DEFAULT_ADDRESS

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#@]+")


class GatewaySettings(AccessSettings):
    """The gateway of Quire: the HTTP APIs, for clients of OpenAI's. Keeps nothing: any number of them may run."""

    section: ClassVar[str] = "gateway"
    model_config = SettingsConfigDict(env_prefix="QUIRE_GATEWAY_", cli_prog_name="python -m gateway_svc")

    listen: str = Field("127.0.0.1:8000", description="address to serve on, host:port; port 0 takes any free one")
    scheduler: str = Field(
        DEFAULT_ADDRESS,
        description="scheduler to send requests to, host:port, or several with commas between, of which one leads; a "
        "host name stands for all of its addresses",
    )
    scheduler_timeout_s: float = Field(
        30.0,
        gt=0,
        description="how long an HTTP request waits for a scheduler that does not answer, such as one that "
        "is started again, before its answer is 503",
    )
    shares_port: bool = Field(
        False,
        description="let other gateways listen on the same port (SO_REUSEPORT): each gets a part of the connections",
    )
    max_http_body_mb: int = Field(
        16, ge=1, le=1024, description="MiB of a request's body; larger ones are refused with 413"
    )
    max_http_connections: int = Field(
        4096, ge=1, description="connections open at once; further ones get 503 while as many have requests"
    )
    slow_reader_timeout_s: float = Field(
        60.0,
        ge=0.1,
        le=86_400,
        description="how long a client may take nothing of an answer that is ready for it; then the connection is cut",
    )
    cors_origins: str | None = Field(
        None,
        description="web pages whose scripts may call (CORS), as scheme://host[:port] with commas between; "
        "*: all; absent: none",
    )
    drain_timeout_s: float = Field(30.0, ge=0, description="how long open answers may continue after SIGTERM")
    access_log: bool = Field(
        True, description="log each HTTP call that has ended, but those of probes and scrapes (`call ended`)"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level logged")
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="format of the log: console (readable lines) or json; auto: console on a terminal"
    )
    log_file: Path | None = Field(None, description="file for the log, instead of standard error")
    log_max_bytes: int = Field(
        16 * 1024 * 1024,
        ge=4096,
        description="size in bytes at which the log file is rotated to NAME.1, replacing an older one",
    )
    status_fd: int | None = Field(None, description="pipe on which the start's progress is reported to the supervisor")
    parent_pipe_fd: int | None = Field(None, description="pipe that closes when the supervisor is gone")
    print_config: bool = Field(False, description="print the settings in force as TOML and exit")

    @property
    def origins(self) -> list[str]:
        """Web pages whose scripts may call, one by one."""
        return [each.strip() for each in (self.cors_origins or "").split(",") if each.strip()]

    @field_validator("cors_origins")
    @classmethod
    def _web_origins(cls, value: str | None) -> str | None:
        for each in (value or "").split(","):
            if each.strip() and not _ORIGIN.fullmatch(each.strip()):
                raise ValueError(f"{each.strip()!r} is no origin: give * or scheme://host[:port], without a path")
        return value

    @field_validator("listen")
    @classmethod
    def _listen_address(cls, value: str) -> str:
        return check_listen_address(value)

    @field_validator("scheduler")
    @classmethod
    def _addresses(cls, value: str) -> str:
        return check_address(value)
