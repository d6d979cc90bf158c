"""`quire serve`: a model served on this machine by one command, until it is told to end."""

import asyncio
import importlib.util
import shutil
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

import quire
from quire.cli.install import install_hint
from quire.cli.output import EXIT_FAILED, EXIT_USAGE, err, fail, out
from quire.cli.serve_settings import ServeSettings, settle
from quire.cli.supervisor.child import StartFailedError
from quire.cli.supervisor.data_folder import DataFolder, FolderInUseError
from quire.cli.supervisor.embedded_store import StoreFailedError
from quire.cli.supervisor.places import PlaceError
from quire.cli.supervisor.supervisor import Supervisor
from quire.params import DEFAULT_ADDRESS
from quire.settings import to_toml

NEEDS = {"scheduler": ("tokenizers", "redis", "uvloop"), "worker": ("torch", "safetensors", "numpy")}


def serve(
    model: Annotated[str | None, typer.Argument(help="Folder of a checkpoint, or its id on the hub.")] = None,
    listen: Annotated[
        str | None, typer.Option(help=f"Address, host:port; port 0 takes any free one. Default: {DEFAULT_ADDRESS}.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes. Default: 1.")] = None,
    standby: Annotated[
        bool | None,
        typer.Option(
            "--standby", help="Run a second scheduler, on the next port, that goes on when the first is gone."
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where journal and logs are kept. Default: ~/.local/state/quire.")
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="Redis or Valkey for the journal; REDIS_URL means the same. Default: embedded.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="Without a URL: auto, embedded or memory (not durable). Default: auto.")
    ] = None,
    appendfsync: Annotated[
        str | None,
        typer.Option(
            help="When the embedded store syncs its file: always, before anything is delivered, or everysec, faster "
            "and up to 2 s may be lost with it. Default: always."
        ),
    ] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Blocks of a worker's KV pool. Default: by memory.")] = None,
    num_host_blocks: Annotated[
        int | None, typer.Option(help="Blocks of a worker's swap pool in host memory. Default: 0.")
    ] = None,
    kv_memory_fraction: Annotated[
        float | None, typer.Option(help="KV pool as part of the free memory, up to 1.")
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a block. Default: 16.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16. Default: auto.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N. Default: auto.")] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of a worker. Default: its share of all cores but one.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences running at once on a worker. Default: 256.")
    ] = None,
    max_batched_tokens: Annotated[int | None, typer.Option(help="Tokens computed in one step. Default: 512.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest sequence, in tokens. Default: the model's.")
    ] = None,
    pipeline_depth: Annotated[int | None, typer.Option(help="Steps on their way at once, 1 or 2. Default: 2.")] = None,
    preemption: Annotated[
        str | None,
        typer.Option(help="When KV memory is short: swap, recompute or auto, whichever costs less. Default: auto."),
    ] = None,
    order: Annotated[
        str | None, typer.Option(help="Who is next: fcfs, first come, or edf, earliest deadline. Default: fcfs.")
    ] = None,
    max_queue: Annotated[int | None, typer.Option(help="Requests that may wait. Default: 1000.")] = None,
    drain_timeout_s: Annotated[
        float | None, typer.Option(help="Time for running requests at the end. Default: 30.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error. Default: info.")] = None,
    verbose: Annotated[bool | None, typer.Option("--verbose", "-v", help="Services' logs to standard error.")] = None,
    config: Annotated[
        Path | None, typer.Option(envvar="QUIRE_CONFIG", help="TOML file with tables serve, scheduler and worker.")
    ] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the settings as TOML and end.")] = False,
) -> None:
    """Serve a model on this machine: store, scheduler and workers, watched and restarted.

    Every option is also a variable (QUIRE_SERVE_WORKERS) and a key of the table "serve" in the TOML file (workers);
    the option wins over the variable, the variable over the file.
    """
    given = {name: value for name, value in locals().items() if name not in ("config", "print_config")}
    try:
        settings = settle(given, config)
    except (OSError, ValueError) as error:
        fail(str(error), EXIT_USAGE)
    if print_config:
        sys.stdout.write(to_toml(settings) + "\n")
        return
    _check_extras()
    try:
        folder = DataFolder(settings.folder)
    except FolderInUseError as error:
        fail(str(error), EXIT_USAGE)
    except OSError as error:
        fail(f"the data folder {settings.folder} cannot be used: {error}; choose another with --data-dir", EXIT_USAGE)
    try:
        code = asyncio.run(_serve(settings, folder))
    finally:
        folder.close()
    raise typer.Exit(code)


def _check_extras() -> None:
    for extra, modules in NEEDS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        if missing:
            fail(f"the {extra} needs {', '.join(missing)}; run {install_hint('scheduler', 'worker', 'embedded')}")


async def _serve(settings: ServeSettings, folder: DataFolder) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    try:
        supervisor = Supervisor(settings, folder, _say)
        _say(f"starting {settings.model}; logs in {folder.path / 'logs'}")
        await supervisor.run(stop, lambda ready: _greet(ready, settings.workers))
    except StartFailedError as error:
        _say(str(error))
        return error.exit_code
    except PlaceError as error:
        _say(str(error))
        return EXIT_USAGE
    except StoreFailedError as error:
        _say(str(error))
        return EXIT_FAILED
    return 0


async def _greet(supervisor: Supervisor, num_workers: int) -> None:
    async with quire.AsyncClient(supervisor.address) as client:
        model, stats = await client.model(), await client.stats()
    blocks = stats.blocks
    num_late = num_workers - len(stats.workers)
    late = f"; {num_late} of {num_workers} workers still to come" if num_late else ""
    address = "" if supervisor.address == DEFAULT_ADDRESS else f" --address {supervisor.address}"
    out.print(f"[bold green]Quire is ready[/bold green] at [bold]{supervisor.address}[/bold]")
    for name, value in (
        ("model", f"{model.name} ({model.architecture}, {model.dtype}, up to {model.max_model_len} tokens)"),
        ("memory", f"{blocks.total} KV blocks of {blocks.block_size} tokens, {blocks.total_slots} tokens in all{late}"),
        ("store", supervisor.store_name),
        *(("", warning) for warning in supervisor.store_warnings()),
        ("try", f"{_program()} generate{address} 'Once upon a time'"),
    ):
        out.print(f"  {name:<8}{value}", markup=False, soft_wrap=True)


def _program() -> str:
    """What a person types to run us: the name, or the path where the name would not find us."""
    path = Path(sys.argv[0])
    return "quire" if path.name != "quire" or shutil.which("quire") else str(path)


def _say(message: str) -> None:
    err.print(f"quire: {message}", markup=False)
