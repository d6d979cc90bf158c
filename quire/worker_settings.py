"""Settings of the worker process; in this package because `quire serve` takes, checks and prints them too."""

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from quire.address import check_address, check_host
from quire.settings import Settings
from quire.typed_names import flag_of

MOST_BLOCKS = 1 << 22  # of either pool; the scheduler accepts no more


class WorkerSettings(Settings):
    """A worker of Quire: one model on one device, its KV memory, and the execution of steps."""

    section: ClassVar[str] = "worker"
    model_config = SettingsConfigDict(env_prefix="QUIRE_WORKER_")

    model: str = Field(description="folder of a Hugging Face checkpoint, or its id on the hub")
    model_name: str | None = Field(
        None, max_length=1024, description="name under which it is served; absent: as given by --model"
    )
    scheduler: str | None = Field(
        None,
        description="host:port to register with, or several with commas between, of which one leads; a name stands for "
        "all of its addresses; absent: serve without",
    )
    listen: str = Field("127.0.0.1:0", description="address to serve on, host:port; port 0 takes any free one")
    advertise: str | None = Field(None, description="host or host:port at which the scheduler reaches this worker")
    worker_id: str | None = Field(
        None, min_length=1, max_length=128, description="unique and stable name; absent: from host and port"
    )
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="cpu, cuda, cuda:N; auto: cuda if there is one"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="of weights; auto: the checkpoint's on cuda; on a CPU that multiplies bfloat16 (AMX, AVX-512 BF16, "
        "NEON BF16) bfloat16 for checkpoints of 16 bits, else float32",
    )
    weight_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="of matrices as kept on a CPU; int8: rounded for each output, which takes less memory and time; "
        "auto: as --dtype",
    )
    kv_dtype: Literal["auto", "fp8", "int8"] = Field(
        "auto",
        description="of KV memory; fp8: half of it for a token, with the device runner; int8: a quarter of float32 and "
        "a little, with a CPU's native kernels; auto: as --dtype",
    )
    generation_config: Literal["model", "none"] = Field(
        "model",
        description="where a request's sampling parameters come from that it leaves out; model: temperature, top_k, "
        "top_p, min_p and repetition_penalty of the folder's generation_config.json; none: Quire's own defaults",
    )
    runner: Literal["auto", "cpu", "device"] = Field(
        "auto",
        description="what executes steps: device keeps an accelerator busy, cpu does one thing after the other; "
        "auto: device on cuda",
    )
    kernels: Literal["auto", "native", "torch"] = Field(
        "auto",
        description="what a CPU computes with beside matrix products: native code, compiled at first use, or torch; "
        "auto: native, or torch with a warning where there is no compiler",
    )
    graphs: bool = Field(
        True, description="capture decode steps as CUDA graphs; without, starts are quicker and steps slower"
    )
    block_size: int = Field(16, ge=1, le=256, description="tokens in a block")
    num_blocks: int | None = Field(None, ge=1, le=MOST_BLOCKS, description="blocks of the KV pool")
    kv_memory_fraction: float | None = Field(
        None, gt=0, le=1, description="KV pool as part of the memory that the model, on cuda also its steps, leave free"
    )
    kv_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="KV pool in bytes; absent, like the other two sizes: as much as can be used, up to the part of the "
        "free memory that is this worker's",
    )
    memory_bytes: int | None = Field(
        None,
        ge=1,
        description="main memory that a worker on a CPU may take in all, weights, steps and KV pool: its share where "
        "several are on one machine; absent: quire serve gives each worker an equal share of what is free, of which "
        "9/10 are for the pool; run by hand 9/10 in a container with a limit, else half",
    )
    num_host_blocks: int = Field(
        0,
        ge=0,
        le=MOST_BLOCKS,
        description="blocks of main memory to which preempted sequences are swapped; 0: they are computed again",
    )
    max_num_seqs: int = Field(256, ge=1, le=65536, description="sequences at once")
    max_batched_tokens: int | None = Field(
        None,
        ge=1,
        le=1 << 20,
        description="tokens computed in one step, at most; absent: 8192 on cuda, and 512 on a CPU, where more at once "
        "make none of them cheaper, and whoever else is running waits for them",
    )
    max_model_len: int | None = Field(None, ge=2, description="longest sequence; absent: the model's")
    threads: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="threads of the computation; absent: as many as there are processors, within a container's quota",
    )
    drain_timeout_s: float = Field(
        20.0, ge=0, description="when told to end: how long what runs here may take to move elsewhere, or to end"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level logged")
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="of the log: console (lines to read) or json; auto: console on a terminal"
    )
    log_file: Path | None = Field(None, description="file for the log, in place of standard error")
    log_max_bytes: int = Field(
        16 * 1024 * 1024,
        ge=4096,
        description="size in bytes from which the log file is set aside, as NAME.1 in place of an older one",
    )
    status_fd: int | None = Field(None, description="pipe on which the supervisor is told how far the start is")
    parent_pipe_fd: int | None = Field(None, description="pipe that closes when the supervisor is gone")
    check: bool = Field(
        False,
        description="check options and model folder, without loading them, and exit: with code 0, or with code 2 and "
        "one line that says what is wrong",
    )
    print_config: bool = Field(False, description="print the settled settings as TOML and exit")

    @field_validator("scheduler")
    @classmethod
    def _addresses(cls, value: str | None) -> str | None:
        return None if value is None else check_address(value)

    @field_validator("advertise")
    @classmethod
    def _host(cls, value: str | None) -> str | None:
        return None if value is None else check_host(value)

    @model_validator(mode="after")
    def _one_pool_size(self) -> Self:
        names = ("num_blocks", "kv_memory_fraction", "kv_memory_bytes")
        given = [f"{flag_of(name)} {getattr(self, name)}" for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each settle the size of the KV pool: give only one of them")
        return self
