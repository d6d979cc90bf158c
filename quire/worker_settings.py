"""Settings of the worker process; in this package because `quire serve` takes, checks and prints them too."""

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from quire.address import SCHEMES, check_address, check_host, check_listen_address
from quire.peer_tls_settings import PeerTlsSettings
from quire.typed_names import flag_of

MOST_BLOCKS = 1 << 22  # of either pool; the scheduler accepts no more


class WorkerSettings(PeerTlsSettings):
    """A worker of Quire: one model on one device, its KV memory, and the execution of steps."""

    section: ClassVar[str] = "worker"
    model_config = SettingsConfigDict(env_prefix="QUIRE_WORKER_", cli_prog_name="python -m worker_svc")

    model: str = Field(description="folder of a Hugging Face checkpoint, or its id on the hub")
    model_name: str | None = Field(
        None, max_length=1024, description="name under which it is served; absent: as given by --model"
    )
    scheduler: str | None = Field(
        None,
        description="scheduler to register with, host:port, or several with commas between, of which one leads; a host "
        "name stands for all of its addresses; absent: do not register",
    )
    listen: str = Field("127.0.0.1:0", description="address to serve on, host:port; port 0 takes any free one")
    advertise: str | None = Field(None, description="host or host:port at which the scheduler reaches this worker")
    worker_id: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        description="unique and stable name of the worker; absent: made from host and port",
    )
    role: Literal["mixed", "prefill", "decode"] = Field(
        "mixed",
        description="part of a request that the worker computes: prefill (prompts; requests leave with their first "
        "token), decode (what follows), or mixed (both). A role that no other serving worker has is taken as well",
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="device to compute on: cpu, cuda, cuda:N; auto: cuda if there is one. With "
        "--tensor-parallel that of rank 0, and with several workers that of the first; the other ranks and workers of "
        "its machine take the devices behind it",
    )
    worker_number: int = Field(
        0,
        ge=0,
        le=63,
        description="number of this worker among those of its machine, from 0: it takes the CUDA devices behind those "
        "of the workers before it. Workers of one device take turns where there are fewer devices",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="dtype of weights; auto: the checkpoint's on cuda; on a CPU that multiplies bfloat16 (AMX, AVX-512 "
        "BF16, NEON BF16) bfloat16 for checkpoints of 16 bits, else float32",
    )
    weight_dtype: Literal["auto", "int8", "fp8", "int4"] = Field(
        "auto",
        description="dtype of matrices; int8: quantised per output channel, on a CPU, which takes less memory and "
        "time; fp8: the same in e4m3, with the device runner; int4: in groups of 128 inputs, with the device runner; "
        "auto: as --dtype",
    )
    kv_dtype: Literal["auto", "fp8", "int8"] = Field(
        "auto",
        description="dtype of KV memory; fp8: half the memory per token, with the device runner; int8: a little over a "
        "quarter of float32's, with a CPU's native kernels; auto: as --dtype",
    )
    generation_config: Literal["model", "none"] = Field(
        "model",
        description="source of sampling parameters that a request leaves out; model: those in the folder's "
        "generation_config.json; none: Quire's own defaults",
    )
    runner: Literal["auto", "cpu", "device"] = Field(
        "auto",
        description="runner of steps: device keeps an accelerator busy, cpu works sequentially; auto: device on cuda",
    )
    kernels: Literal["auto", "native", "torch"] = Field(
        "auto",
        description="kernels of a CPU for all but matrix products: native code, compiled at first use, or torch; "
        "auto: native, or torch with a warning where there is no compiler",
    )
    attention: Literal["auto", "triton", "flashinfer", "flash-attn"] = Field(
        "auto",
        description="kernels of attention on cuda: Quire's own in Triton, or a library's where it takes the model's "
        "heads and dtypes; auto: what is fastest of those that are installed, measured at the first start on a device",
    )
    graphs: bool = Field(True, description="capture steps as CUDA graphs; without: quicker starts and slower steps")
    block_size: int = Field(16, ge=1, le=256, description="tokens in a block")
    num_blocks: int | None = Field(None, ge=1, le=MOST_BLOCKS, description="blocks of the KV pool")
    kv_memory_fraction: float | None = Field(
        None,
        gt=0,
        le=1,
        description="size of the KV pool as part of the memory that the model, on cuda also its steps, leaves free",
    )
    kv_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="size of the KV pool in bytes; absent, like the other two sizes: as much as can be used, up to "
        "this worker's share of the free memory",
    )
    memory_bytes: int | None = Field(
        None,
        ge=1,
        description="total main memory of a worker on a CPU, for weights, steps and KV pool: its share where several "
        "run on one machine; absent: quire serve gives each worker an equal share of the free memory, with 9/10 of it "
        "for the pool; a worker started by hand takes 9/10 in a container with a limit, else half",
    )
    num_host_blocks: int = Field(
        0,
        ge=0,
        le=MOST_BLOCKS,
        description="blocks of main memory for swapped sequences; 0: preempted sequences are recomputed",
    )
    fetch_memory_bytes: int | None = Field(
        None,
        ge=0,
        description="main memory for KV blocks that come from other workers, until a step places them; 0: blocks of "
        "this worker do not travel; absent: a sixteenth of the KV pool, from 16 to 256 MiB",
    )
    max_num_seqs: int = Field(256, ge=1, le=65536, description="maximum number of sequences at once")
    max_batched_tokens: int | None = Field(
        None,
        ge=1,
        le=1 << 20,
        description="maximum number of tokens computed in one step; absent: 8192 on cuda, and 512 on a CPU, where "
        "larger steps save nothing per token and delay the other sequences",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="maximum length of a sequence, in tokens; absent: the model's"
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="number of compute threads; absent: the number of processors, within a container's quota",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=32,
        description="number of processes (ranks) that compute each step of a worker together, each with its part of "
        "the weights and of every KV block; on a CPU they share the worker's threads and memory, on cuda each has a "
        "device of its own",
    )
    rank: int | None = Field(
        None,
        ge=0,
        le=31,
        description="number of this process among the ranks of --tensor-parallel that are started one by one, on "
        "several machines for example: 0 is the worker that the scheduler knows, the others find it at "
        "--group-address; absent: rank 0, which starts the others itself",
    )
    group_address: str | None = Field(
        None,
        description="address where rank 0 waits for the other ranks, host:port, in a network of their own: what ranks "
        "say to each other is not encrypted",
    )
    rank_timeout_s: float = Field(
        10.0,
        ge=1.5,
        le=3600,
        description="seconds without a sign of life of a rank, which comes each second, or without the end of a step "
        "that runs, after which a group ends, to be started again as one",
    )
    metrics_listen: str | None = Field(
        None,
        description="address of an HTTP listener for Prometheus, host:port, which answers with this process's figures; "
        "port 0 takes any free one; absent: none. The gateway's /metrics has the figures of the deployment anyway",
    )
    drain_timeout_s: float = Field(
        20.0, ge=0, description="after SIGTERM: how long running sequences may take to move to other workers, or to end"
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
    check: bool = Field(
        False,
        description="check options and model folder without loading the model, and exit with code 0, or with code 2 "
        "and one line that says what is wrong",
    )
    print_config: bool = Field(False, description="print the settings in force as TOML and exit")

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _listen_address(cls, value: str | None) -> str | None:
        return None if value is None else check_listen_address(value)

    @field_validator("scheduler")
    @classmethod
    def _addresses(cls, value: str | None) -> str | None:
        return None if value is None else check_address(value)

    @field_validator("group_address")
    @classmethod
    def _group_address(cls, value: str | None) -> str | None:
        if value is not None and ("," in value or value.startswith(SCHEMES)):
            raise ValueError(f"{value!r} is not one address; write host:port, such as 10.0.0.7:7900")
        return None if value is None else check_address(value)

    @field_validator("advertise")
    @classmethod
    def _host(cls, value: str | None) -> str | None:
        return None if value is None else check_host(value)

    @model_validator(mode="after")
    def _rank_in_group(self) -> Self:
        rank, size = self.rank, self.tensor_parallel
        if (rank is None) != (self.group_address is None):
            raise ValueError(f"{flag_of('rank')} and {flag_of('group_address')} go together: give both, or none")
        if rank is not None and rank >= size:
            raise ValueError(
                f"{flag_of('rank')} {rank} is not among the ranks 0 to {size - 1} of {flag_of('tensor_parallel')} "
                f"{size}: give the same {flag_of('tensor_parallel')} to all ranks, and each its number"
            )
        return self

    @model_validator(mode="after")
    def _one_pool_size(self) -> Self:
        names = ("num_blocks", "kv_memory_fraction", "kv_memory_bytes")
        given = [f"{flag_of(name)} {getattr(self, name)}" for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each set the size of the KV pool: give only one of them")
        return self
