"""`quire serve`: a model served on this machine by one command, until it is told to end."""

import asyncio
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

import quire
from common.settings import to_toml
from quire.cli.output import EXIT_FAILED, EXIT_USAGE, err, fail, out
from quire.cli.serve_settings import ServeSettings
from quire.cli.supervisor.child import StartFailedError
from quire.cli.supervisor.data_folder import DataFolder, FolderInUseError
from quire.cli.supervisor.embedded_store import StoreFailedError
from quire.cli.supervisor.places import PlaceError
from quire.cli.supervisor.supervisor import Supervisor
from quire.params import DEFAULT_ADDRESS

NEEDS = {"scheduler": ("tokenizers", "redis", "uvloop"), "worker": ("torch", "safetensors", "numpy")}


def serve(
    model: Annotated[str | None, typer.Argument(help="Folder of a checkpoint, or its id on the hub.")] = None,
    listen: Annotated[
        str | None, typer.Option(help=f"Address, host:port; port 0 takes any free one. Default: {DEFAULT_ADDRESS}.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes. Default: 1.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where journal and logs are kept. Default: $XDG_STATE_HOME/quire.")
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="Redis or Valkey for the journal; REDIS_URL means the same. Default: embedded.")
    ] = None,
    store: Annotated[str | None, typer.Option(help="Without a URL: auto, embedded or memory.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Blocks of a worker's KV pool.")] = None,
    kv_memory_fraction: Annotated[float | None, typer.Option(help="KV pool as part of the free memory.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a block.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of a worker. Default: its share of all cores but one.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences running at once on a worker.")] = None,
    max_batched_tokens: Annotated[int | None, typer.Option(help="Tokens computed in one step.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence, in tokens.")] = None,
    pipeline_depth: Annotated[int | None, typer.Option(help="Steps on their way at once: 1 or 2.")] = None,
    max_queue: Annotated[int | None, typer.Option(help="Requests that may wait.")] = None,
    drain_timeout_s: Annotated[float | None, typer.Option(help="Time for running requests at the end.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    verbose: Annotated[bool | None, typer.Option("--verbose", "-v", help="Services' logs to standard error.")] = None,
    config: Annotated[
        Path | None, typer.Option(envvar="QUIRE_CONFIG", help="TOML file; tables [serve], [scheduler], [worker].")
    ] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the settings as TOML and end.")] = False,
) -> None:
    """Serve a model on this machine: store, scheduler and workers, watched and restarted.

    Every option is also a QUIRE_SERVE_… variable and a key of the [serve] table of the TOML file, in this order of
    precedence.
    """
    given = {name: value for name, value in locals().items() if name not in ("config", "print_config")}
    settings = _settle(given, config)
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


def _settle(given: dict[str, Any], config: Path | None) -> ServeSettings:
    """Flags over environment over file. Ends the command if they make no sense."""
    if config is not None:
        os.environ["QUIRE_CONFIG"] = str(config.absolute())  # for the services too
    try:
        return ServeSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        fail("; ".join(_explained(each) for each in error.errors()), EXIT_USAGE)
    except (OSError, ValueError) as error:
        fail(str(error), EXIT_USAGE)


def _explained(error: Any) -> str:
    name = str(error["loc"][0]) if error["loc"] else "settings"
    if name == "model" and error["type"] == "missing":
        return "say which model to serve: quire serve MODEL"
    return f"--{name.replace('_', '-')}: {error['msg']}, not {error['input']!r}"


def _check_extras() -> None:
    for extra, modules in NEEDS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        if missing:
            fail(f"the {extra} needs {', '.join(missing)}; run pip install 'quire[scheduler,worker,embedded]'")


async def _serve(settings: ServeSettings, folder: DataFolder) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    try:
        supervisor = Supervisor(settings, folder, _say)
        _say(f"starting {settings.model}; logs in {folder.path / 'logs'}")
        await supervisor.run(stop, _greet)
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


async def _greet(supervisor: Supervisor) -> None:
    async with quire.AsyncClient(supervisor.address) as client:
        model, blocks = await client.model(), (await client.stats()).blocks
    option = "" if supervisor.address == DEFAULT_ADDRESS else f" --address {supervisor.address}"
    slots = blocks.total * blocks.block_size
    out.print(f"[bold green]Quire is ready[/bold green] at [bold]{supervisor.address}[/bold]")
    out.print(f"  model   {model.name} ({model.architecture}, {model.dtype}, up to {model.max_model_len} tokens)")
    out.print(f"  memory  {blocks.total} KV blocks of {blocks.block_size} tokens, {slots} tokens in all")
    out.print(f"  store   {supervisor.store_name}", markup=False)
    out.print(f"  try     quire generate{option} 'Once upon a time'", markup=False)


def _say(message: str) -> None:
    err.print(f"quire: {message}", markup=False)
