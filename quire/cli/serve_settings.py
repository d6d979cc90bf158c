"""Settings of `quire serve`: its own, and those that it passes to scheduler, workers and gateways.

Sources by precedence: flags, QUIRE_SERVE_… variables, the table [serve] of the settings file, then the sources of the
service itself: QUIRE_SCHEDULER_…, QUIRE_WORKER_… and QUIRE_GATEWAY_…, [scheduler], [worker] and [gateway].
"""

import difflib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from quire.address import check_listen_address
from quire.gateway_settings import GatewaySettings
from quire.machine import num_processors
from quire.params import DEFAULT_ADDRESS
from quire.scheduler_settings import SchedulerSettings
from quire.settings import (
    CONFIG_VARIABLE,
    INTERNAL,
    Settings,
    check_variables,
    explain_errors,
    names_given,
    nearest,
    read_tables,
    settle,
    to_toml,
)
from quire.typed_names import flag_of
from quire.variables import HIDDEN_URL, KNOWN, meant_variable
from quire.worker_settings import WorkerSettings

ALIASES = {"max_queue": "max_queue_requests"}  # shorter, earlier names
SERVICES: tuple[type[Settings], ...] = (SchedulerSettings, WorkerSettings, GatewaySettings)
# Settings of services that `quire serve` sets itself, and the option to use instead.
RESERVED: dict[type[Settings], dict[str, str]] = {
    SchedulerSettings: {"listen": "--listen", "store": "--redis-url or --store", "standby": "--standby"},
    GatewaySettings: {"listen": "--http", "scheduler": "--listen", "shares_port": "--gateways"},
    WorkerSettings: {
        "model": "MODEL",
        "scheduler": "--listen",
        "worker_id": "--workers, which numbers them",
        "worker_number": "--workers, which numbers them",
    },
}
# Settings that differ in meaning between the services: they stand in the service's own table only.
_APART = {"advertise", "group_address", "metrics_listen", "rank"}
_SCHEDULER_ALONE = {"drain_timeout_s"}
_MAY_BE_A_FINGERPRINT = re.compile("[0-9a-f]{8,}")  # its first characters
_HINTS = {
    "http": "write host:port, with a port of at most 65535, such as 127.0.0.1:8000",
    "listen": "write host:port, with a port of at most 65535, such as 127.0.0.1:7847",
    "redis_url": "write redis://host:port/db, rediss://…, unix:///path/to/socket, or redis+cluster://host:port,host:port",
}


class ServeSettings(Settings):
    """Settings of the supervisor itself, which no service needs."""

    section: ClassVar[str] = "serve"
    model_config = SettingsConfigDict(env_prefix="QUIRE_SERVE_")

    model: str = Field(min_length=1, description="folder of a checkpoint, or its id on the Hugging Face hub")
    listen: str = Field(
        DEFAULT_ADDRESS,
        pattern=r"^.+:\d{1,5}$",
        description="address to serve on, host:port; port 0 takes any free one",
    )
    workers: int = Field(1, ge=1, le=64, description="number of worker processes")
    http: str = Field(
        "127.0.0.1:8000",
        pattern=r"^.+:\d{1,5}$",
        description="address of the HTTP API, host:port; port 0 takes any free one",
    )
    gateways: int = Field(1, ge=0, le=64, description="number of processes of the HTTP API; 0: no HTTP API")
    standby: bool = Field(
        False, description="run a second scheduler, on the next port, that takes over when the first is gone"
    )
    data_dir: Path | None = Field(
        None,
        description="folder of journal and logs, readable to you alone; absent: quire in $XDG_STATE_HOME, which is "
        "~/.local/state unless set",
    )
    redis_url: str | None = Field(
        None,
        pattern=r"^(rediss?(\+cluster)?|unix)://",
        description="Redis or Valkey for the journal, one server or a cluster; REDIS_URL means the same; absent: an "
        "embedded Valkey",
    )
    store: Literal["auto", "embedded", "memory"] = Field(
        "auto", description="store of the journal if no URL is given: auto, embedded or memory (not durable)"
    )
    appendfsync: Literal["always", "everysec"] = Field(
        "always",
        description="when the embedded store syncs its file: always (before anything is delivered), or everysec "
        "(faster, but its death may lose up to 2 s of writes)",
    )
    verbose: bool = Field(False, description="print the services' logs on standard error, too")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Uses only the values that `settle_all` has gathered."""
        return (init_settings,)

    @field_validator("listen", "http")
    @classmethod
    def _listen_address(cls, value: str) -> str:
        return check_listen_address(value)

    @field_validator("data_dir")
    @classmethod
    def _expanded(cls, value: Path | None) -> Path | None:
        try:
            return value if value is None else value.expanduser()
        except RuntimeError as error:  # a user without an entry, or nobody's name
            raise ValueError(f"there is no home folder for {value}: give the path without ~") from error

    @property
    def folder(self) -> Path:
        """The data folder in force. Raises ValueError where there is no home folder for it."""
        if self.data_dir is not None:
            return self.data_dir.absolute()
        state = os.environ.get("XDG_STATE_HOME")
        try:
            return ((Path(state) if state else Path.home() / ".local" / "state") / "quire").absolute()
        except RuntimeError as error:
            raise ValueError("there is no home folder for journal and logs; name a folder with --data-dir") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Settings of all processes, settled before anything is started."""

    serve: ServeSettings
    scheduler: SchedulerSettings
    worker: WorkerSettings
    gateway: GatewaySettings
    scheduler_flags: tuple[str, ...]  # those that it does not find in its own variables and table
    worker_flags: tuple[str, ...]
    gateway_flags: tuple[str, ...]
    names: Mapping[str, str]  # under which settings were given to `quire serve`, by field
    worker_names: Mapping[str, str]  # the same for a worker's settings, from any source

    @property
    def num_schedulers(self) -> int:
        """Number of scheduler processes: one for each shard, and the standby."""
        return self.scheduler.shards + self.serve.standby

    def toml(self) -> str:
        """Settings file that would give the same settings."""
        services = [to_toml(each, RESERVED[type(each)]) for each in (self.scheduler, self.worker, self.gateway)]
        return "\n\n".join([to_toml(self.serve), *services]) + "\n"


class _Given(NamedTuple):
    """A value and the name under which it was given."""

    value: Any
    label: str
    level: Literal["flag", "variable", "file", "REDIS_URL"]


def passed_fields(kind: type[Settings]) -> list[str]:
    """Names of a service's settings that are options of `quire serve`."""
    left_out = {*INTERNAL, *RESERVED[kind], *ServeSettings.model_fields, *_APART}
    if kind is WorkerSettings:
        left_out |= _SCHEDULER_ALONE
    return [name for name in kind.model_fields if name not in left_out]


def settle_all(flags: Mapping[str, Any], config: Path | None) -> Settled:
    """Merge flags, variables and the file, in this precedence. Raises ValueError with one sentence.

    Sets QUIRE_CONFIG, so that the services read the same file.
    """
    tables = read_tables(config) if config is not None else {}
    if config is not None:
        os.environ[CONFIG_VARIABLE] = str(config.absolute())
    _check_other_variables()
    for kind in SERVICES:
        _check_reserved(kind, tables.get(kind.section, {}))
    given = _gather(flags, tables.get("serve", {}))
    serve = _settle_own(given)
    serve = serve.model_copy(update={"data_dir": serve.folder})
    passed = {kind: {name: each for name, each in given.items() if name in passed_fields(kind)} for kind in SERVICES}
    scheduler = settle(SchedulerSettings, *_split(passed[SchedulerSettings], listen=serve.listen))
    if scheduler.shards > serve.workers:
        raise ValueError(
            f"{scheduler.shards} shards need at least as many workers, and there would be {serve.workers}: give "
            f"--workers {scheduler.shards} or more"
        )
    worker = settle(WorkerSettings, *_split(passed[WorkerSettings], model=serve.model))
    _check_only_model(scheduler, worker, given)
    worker_flags = _flags(passed[WorkerSettings], worker)
    if worker.threads is None:
        worker = worker.model_copy(update={"threads": share_of_cores(num_processors(), serve.workers)})
        worker_flags += (f"--threads={worker.threads}",)
    gateway = settle(GatewaySettings, *_split(passed[GatewaySettings], listen=serve.http))
    names = {name: each.label for name, each in given.items()}
    passed_names = {name: each.label for name, each in passed[WorkerSettings].items()}
    return Settled(
        serve=serve,
        scheduler=scheduler,
        worker=worker,
        gateway=gateway,
        scheduler_flags=_flags(passed[SchedulerSettings], scheduler),
        worker_flags=worker_flags,
        gateway_flags=_flags(passed[GatewaySettings], gateway),
        names=names,
        worker_names={**names_given(WorkerSettings), **passed_names},
    )


def _check_only_model(scheduler: SchedulerSettings, worker: WorkerSettings, given: Mapping[str, _Given]) -> None:
    """Raise ValueError if the scheduler would refuse the model of all workers. Does not know its fingerprint."""
    only, name = scheduler.only_model, worker.model_name or worker.model
    if only is None or only == name or _MAY_BE_A_FINGERPRINT.fullmatch(only):
        return
    label = given["only_model"].label if "only_model" in given else names_given(SchedulerSettings)["only_model"]
    raise ValueError(
        f"{label} {only!r} is not the name of the model to serve, {name!r}: leave it out, or give --model-name {only!r}"
    )


def share_of_cores(num_cores: int, num_workers: int) -> int:
    """Threads of one worker: an equal share of the cores.

    A single worker with all cores leaves one to the scheduler while its steps are small enough for that to pay.
    """
    return max(1, num_cores // num_workers)


def _gather(flags: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, _Given]:
    """Values given to `quire serve`, later sources winning. Raises ValueError for unknown names."""
    names = {*ServeSettings.model_fields, *ALIASES, *(name for kind in SERVICES for name in passed_fields(kind))}
    prefix = ServeSettings.prefix()
    check_variables(os.environ, prefix, names)
    given: dict[str, _Given] = {}
    if url := os.environ.get("REDIS_URL"):
        given["redis_url"] = _Given(url, "REDIS_URL", "REDIS_URL")
    for name, value in table.items():
        if name not in names:
            near = nearest(name, names)
            raise ValueError(f"[serve] has no setting {name!r}" + (f"; did you mean {near!r}?" if near else ""))
        given[ALIASES.get(name, name)] = _Given(value, f"[serve] {name}", "file")
    for name in sorted(names):
        variable = f"{prefix}{name.upper()}"
        if value := os.environ.get(variable):
            given[ALIASES.get(name, name)] = _Given(value, variable, "variable")
    hidden = os.environ.pop(HIDDEN_URL, None)
    for name, value in {**flags, **({} if hidden is None else {"redis_url": hidden})}.items():
        if value is not None:
            label = "MODEL" if name == "model" else flag_of(name)
            given[name] = _Given(value, label, "flag")
    for each in given.values():
        if each.value == "":
            raise ValueError(f"{each.label} is empty; leave it out, or give it a value")
    return given


def _settle_own(given: Mapping[str, _Given]) -> ServeSettings:
    own = {name: each for name, each in given.items() if name in ServeSettings.model_fields}
    if "model" not in own:
        raise ValueError("no model is given: run quire serve MODEL")
    url, store = own.get("redis_url"), own.get("store")
    if url and store and store.value != "auto":
        if url.level == store.level:
            raise ValueError(f"{store.label} {store.value} and {url.label} contradict each other: give one of them")
        del own["redis_url" if store.level == "flag" or url.level == "REDIS_URL" else "store"]
    sync = own.get("appendfsync")
    if sync and sync.level == "flag" and ("redis_url" in own or (store and store.value == "memory")):
        raise ValueError(f"{sync.label} applies to the embedded store only, and the journal is elsewhere: leave it out")
    try:
        return ServeSettings(**{name: each.value for name, each in own.items()})
    except ValidationError as error:
        wrong = error.errors()
        for each in wrong:
            name = str(each["loc"][0]) if each["loc"] else ""
            each["msg"] = _HINTS.get(name, each["msg"])
        labels = {name: each.label for name, each in own.items()}
        raise ValueError(explain_errors(wrong, ServeSettings, labels)) from error


def _split(given: Mapping[str, _Given], **ours: object) -> tuple[dict[str, Any], dict[str, str]]:
    """Separate values and labels."""
    values = {name: each.value for name, each in given.items()}
    return {**values, **ours}, {name: each.label for name, each in given.items()}


def _check_reserved(kind: type[Settings], table: Collection[str]) -> None:
    """Raises ValueError if a variable or key of a service sets what `quire serve` sets itself; it would be ignored.

    What is for starting one process is refused, too: each process would end at once, or log where nobody looks.
    """
    internal = dict.fromkeys(sorted(INTERNAL & set(kind.model_fields)), "")
    for name, instead in {**internal, "log_file": "--data-dir, the folder of all logs", **RESERVED[kind]}.items():
        variable = f"{kind.prefix()}{name.upper()}"
        if os.environ.get(variable) or name in table:
            source = variable if os.environ.get(variable) else f"[{kind.section}] {name}"
            rest = f", and give {instead}" if instead else ""
            raise ValueError(f"{source}: quire serve sets this itself; leave it out{rest}")


def _check_other_variables() -> None:
    """Raises ValueError for variables that look like misspelt ones of ours; others may belong to other programs."""
    prefixes = [ServeSettings.prefix(), *(kind.prefix() for kind in SERVICES)]
    for variable in sorted(os.environ):
        if not variable.startswith("QUIRE_") or variable in KNOWN or variable.startswith(tuple(prefixes)):
            continue
        whole = meant_variable(variable)
        first = variable.partition("_")[2].partition("_")[0]
        prefix = difflib.get_close_matches(f"QUIRE_{first}_", prefixes, n=1, cutoff=0.85)
        if whole or prefix:
            meant = whole if whole else prefix[0] + variable.split("_", 2)[2] if variable.count("_") > 1 else ""
            raise ValueError(f"{variable} is not a setting of Quire; did you mean {meant or prefix[0] + '…'}?")


def _flags(given: Mapping[str, _Given], settled: Settings) -> tuple[str, ...]:
    """Flags that pass the given settings to a service, as they were parsed."""
    flags = []
    for name in given:
        value = getattr(settled, name)
        if isinstance(value, bool):
            flags.append(flag_of(name if value else f"no_{name}"))
        else:
            flags.append(f"{flag_of(name)}={value}")
    return tuple(flags)
