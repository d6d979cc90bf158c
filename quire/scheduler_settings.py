"""Settings of the scheduler process; in this package because `quire serve` takes, checks and prints them too."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from quire.access_settings import AccessSettings
from quire.address import check_host, check_listen_address
from quire.limit_settings import LimitSettings
from quire.parsing.answer_format import ReasoningParserName, ToolParserName
from quire.peer_tls_settings import PeerTlsSettings
from quire.shards import MOST_SHARDS


class SchedulerSettings(LimitSettings, PeerTlsSettings, AccessSettings):
    """The scheduler of Quire: queues, block tables, journal, and the API that clients call."""

    section: ClassVar[str] = "scheduler"
    model_config = SettingsConfigDict(env_prefix="QUIRE_SCHEDULER_", cli_prog_name="python -m scheduler_svc")

    listen: str = Field("127.0.0.1:7847", description="address to serve on, host:port; port 0 takes any free one")
    advertise: str | None = Field(
        None,
        description="host or host:port at which clients and workers reach this scheduler; standbys refer them to it",
    )
    standby: bool = Field(
        False,
        description="wait while another scheduler leads, and take over when it is gone; without: take over at once",
    )
    shards: int = Field(
        1,
        ge=1,
        le=MOST_SHARDS,
        description="number of shards with which an empty store begins; `quire shards N` changes it later. Each has a "
        "leader, a journal, requests and workers of its own. Any number of schedulers leads them, evenly; it takes as "
        "many workers",
    )
    lease_ms: int = Field(
        1500,
        ge=100,
        le=600_000,
        description="lease of the leader: how long it counts as leading without a renewal; the same for all schedulers",
    )
    store: str = Field(
        "memory",
        description="where the journal lives: redis://, rediss://, unix://, redis+cluster://host:port,host:port "
        "(a cluster, by some of its nodes; rediss+cluster:// with TLS) or memory; set one with a password as a "
        "variable, since everybody may read command lines",
    )
    store_replicas: int | None = Field(
        None,
        ge=0,
        le=16,
        description="replicas that must have an entry of the journal before it counts as written, as far as the node "
        "has so many; absent: 1 in a cluster, else 0",
    )
    store_timeout_s: float = Field(30.0, gt=0, description="how long to wait for the store at the start")
    delivery: Literal["durable", "relaxed"] = Field(
        "durable",
        description="when output is delivered: durable (once the journal has it), or relaxed (at once; tokens that a "
        "client has seen may be lost with the scheduler, and are then computed again)",
    )
    stream_interval_ms: int = Field(
        20,
        ge=0,
        le=1000,
        description="how long a token that is neither the first nor the last of an output may wait, so that under load "
        "the tokens of several quick steps are journaled and delivered together; 0: never",
    )
    restate_entries: int = Field(
        4096, ge=1, description="a live request is written to the journal again after this many entries"
    )
    deployment: str = Field(
        "default",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="name that separates deployments on one store: 1 to 64 letters, digits, dots, underscores, hyphens",
    )
    record_ttl_s: int = Field(
        3600,
        ge=1,
        description="how long a request's record is kept after its end, if there is room: see max_record_mb",
    )
    max_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens computed in one step, prompt and decode together; absent: each worker's own maximum",
    )
    max_num_seqs: int = Field(256, ge=1, description="sequences running at once on one worker")
    watermark: float = Field(0.01, ge=0, lt=1, description="part of the KV pool that admissions keep free")
    order: Literal["fcfs", "edf"] = Field(
        "fcfs",
        description="order within a priority class: fcfs (first come, first served) or edf (earliest deadline first; "
        "requests without one come last). The last in order is preempted first when memory is short",
    )
    priority_patience_s: float = Field(
        30.0,
        gt=0,
        description="how long a better priority class may keep a request waiting; after that, one of every 8 requests "
        "that start is an overtaken one, the longest waiting first",
    )
    preemption: Literal["auto", "swap", "recompute"] = Field(
        "auto",
        description="what happens to the KV of a preempted request: swap (moved to the worker's host pool, recomputed "
        "when that is full), recompute, or auto (the cheaper way for each, as measured)",
    )
    block_fetch: Literal["auto", "always", "never"] = Field(
        "auto",
        description="whether the worker that starts a request fetches KV that another worker has cached, as when a "
        "running request moves: always, never (its tokens are computed), or auto (the quicker way, as measured)",
    )
    pipeline_depth: int = Field(2, ge=1, le=2, description="steps in flight to a worker at once")
    decide: Literal["auto", "early", "late"] = Field(
        "auto",
        description="when the second step in flight is decided: early (as soon as the first is sent), late (so that it "
        "arrives shortly before the first ends, and includes requests that came meanwhile), or auto (late for "
        "workers on a CPU, early for others)",
    )
    prefix_cache: bool = Field(True, description="share the KV blocks of equal prefixes")
    step_form: Literal["delta", "whole"] = Field(
        "delta", description="content of a step: only changes, or (the paper's form, depth 1) every block table in full"
    )
    preempt_every: int | None = Field(None, ge=1, description="for tests: force a preemption every this many steps")
    max_queue_requests: int = Field(1000, ge=1, description="requests that may wait in the queue")
    max_queue_tokens: int = Field(4_000_000, ge=1, description="prompt tokens that may wait in the queue")
    max_queue_wait_ms: int = Field(
        60_000,
        ge=1,
        description="a request is refused with a retry delay if it would wait longer than this for a worker, as "
        "measured lately: after a minute most clients have gone. Lower it to bound the time to the first token under "
        "overload",
    )
    disconnect_grace_s: float = Field(5.0, ge=0, description="how long a request lives after its last reader has gone")
    keepalive_time_s: float = Field(
        20.0,
        ge=0.5,
        le=86_400,
        description="how long a client's connection may be silent before it is pinged: a client that freezes, or whose "
        "host disappears, is noticed after this and keepalive_timeout_s",
    )
    keepalive_timeout_s: float = Field(
        20.0,
        ge=0.5,
        le=86_400,
        description="how long a client has to answer a ping; its gRPC library answers unless the whole process is "
        "blocked, as Node's and others' are while their one thread is busy",
    )
    slow_reader_timeout_s: float = Field(
        60.0,
        gt=0,
        description="how long a client may read nothing from a stream that has output for it; then the stream is cut, "
        "and its requests have lost that reader",
    )
    only_model: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="name of the only model to serve, as its workers call it, or the first 8 or more characters of its "
        "fingerprint; workers of other models are refused. Absent: the model of the first worker",
    )
    tool_parser: Literal["auto", "none", ToolParserName] = Field(
        "auto",
        description="format in which the model calls tools; auto: as its chat template shows. Clients parse by it",
    )
    reasoning_parser: Literal["auto", "none", ReasoningParserName] = Field(
        "auto",
        description="format of the model's reasoning before its answer; auto: as its chat template shows. Clients "
        "parse by it",
    )
    model_patience_s: float = Field(
        30.0,
        ge=0,
        description="how long, after a start, requests of the journal wait for a worker of their model while workers "
        "of another model register; then they fail. Also how long the served model is kept when its last worker has "
        "gone and no request waits for it, before a worker of another model is accepted",
    )
    metrics_listen: str | None = Field(
        None,
        description="address of an HTTP listener for Prometheus, host:port, which answers with this process's figures; "
        "port 0 takes any free one; absent: none. The gateway's /metrics has the figures of the deployment anyway",
    )
    drain_timeout_s: float = Field(30.0, ge=0, description="how long running requests may continue after SIGTERM")
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
    gives_way: bool = Field(
        False, description="end if another scheduler leads, instead of taking over from it; not for a standby"
    )
    print_config: bool = Field(False, description="print the settings in force as TOML and exit")

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _listen_address(cls, value: str | None) -> str | None:
        return None if value is None else check_listen_address(value)

    @field_validator("advertise")
    @classmethod
    def _host(cls, value: str | None) -> str | None:
        return None if value is None else check_host(value)
