"""`quire serve`: serves a model on this machine until it is told to end."""

import asyncio
import importlib.util
import os
import resource
import shutil
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

import quire
from quire.cli.greeting import access_lines, first_lines, sampling_defaults, thread_warnings
from quire.cli.output import EXIT_FAILED, EXIT_USAGE, fail
from quire.cli.serve_options import takes_settings
from quire.cli.serve_settings import Settled, settle_all
from quire.cli.supervisor.announcer import Announcer
from quire.cli.supervisor.child import StartFailedError
from quire.cli.supervisor.data_folder import DataFolder, FolderError
from quire.cli.supervisor.embedded_store import StoreFailedError
from quire.cli.supervisor.listen_addresses import AddressError, dial_address
from quire.cli.supervisor.own_certificates import OwnCertificates, open_keys
from quire.cli.supervisor.shared_access import share_access
from quire.cli.supervisor.stop_signals import set_on_stop_signals
from quire.cli.supervisor.supervisor import Supervisor
from quire.install import install_hint
from quire.machine import num_processors
from quire.redaction import without_passwords
from quire.settings import CONFIG_VARIABLE
from quire.typed_names import as_typed

NEEDS = {
    "scheduler": ("tokenizers", "redis", "uvloop", "prometheus_client"),
    "worker": ("torch", "safetensors", "numpy", "prometheus_client"),
    "gateway": ("fastapi", "httptools", "orjson", "uvicorn", "prometheus_client"),
}

LEAST_FILES = 128  # of a process: half of them for connections of workers, gateways and clients


@takes_settings
def serve(
    model: Annotated[
        str | None, typer.Argument(help="Folder of a checkpoint, or its id on the Hugging Face hub.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(envvar=CONFIG_VARIABLE, help="TOML file with the tables serve, scheduler, worker and gateway."),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all settings that would be in force, as TOML, and exit.")
    ] = False,
    **given: Any,
) -> None:
    """Serve a model on this machine: runs store, scheduler, workers and gateway, and restarts what fails.

    Every option is also a variable (QUIRE_SERVE_WORKERS) and a key of the table "serve" in the TOML file (workers).
    An option wins over its variable, a variable over the file.
    """
    _check_working_folder()
    try:
        settled = settle_all({"model": model, **given}, config)
        data_dir = settled.serve.folder
    except ValueError as error:
        fail(str(error), EXIT_USAGE)
    if print_config:
        sys.stdout.write(settled.toml())
        return
    _check_extras(settled)
    _check_open_files()
    announcer = Announcer(settled.scheduler.log_format)
    try:
        folder = DataFolder(data_dir)
        certificates = OwnCertificates(settled, folder.certificates, announcer.print_message)
    except (FolderError, ValueError) as error:
        fail(as_typed(str(error), settled.names), EXIT_USAGE)
    except OSError as error:
        message = f"the data folder {data_dir} cannot be used: {error}; choose another with --data-dir"
        fail(as_typed(message, settled.names), EXIT_USAGE)
    _share_access(certificates)
    try:
        code = asyncio.run(_serve(settled, certificates, folder, announcer))
    finally:
        shutil.rmtree(folder.certificates, ignore_errors=True)
        folder.close()
    raise typer.Exit(code)


def _check_working_folder() -> None:
    try:
        os.getcwd()
    except OSError:
        fail(
            "the working folder does not exist any more, and libraries of the workers ask for it: cd to another",
            EXIT_USAGE,
        )


def _share_access(certificates: OwnCertificates) -> None:
    settled = certificates.services
    host = dial_address(settled.serve.listen).rpartition(":")[0].strip("[]")
    try:
        share_access(settled.scheduler, host, certificates.trusted)
    except ValueError as error:
        fail(as_typed(str(error), settled.names), EXIT_USAGE)


def _check_extras(settled: Settled) -> None:
    for extra, modules in NEEDS.items():
        if extra == "gateway" and not settled.serve.gateways:
            continue
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        if missing:
            install = install_hint("scheduler", "worker", "gateway", "embedded")
            fail(f"the {extra} needs {', '.join(missing)}; run {install}")


def _check_open_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < LEAST_FILES:
        fail(
            f"a process may open {hard} files here, and {LEAST_FILES} are needed: raise the limit (ulimit -n)",
            EXIT_USAGE,
        )


async def _serve(settled: Settled, certificates: OwnCertificates, folder: DataFolder, announcer: Announcer) -> int:
    """Serves until a signal. Returns the exit code; a failure is reported in one line."""
    stop = asyncio.Event()
    set_on_stop_signals(stop)
    os.environ.setdefault("grpc_proxy", "")  # its services are on this machine: `http_proxy` is not for them
    try:
        supervisor = Supervisor(certificates.services, folder, announcer)
        for key in open_keys(settled):
            announcer.print_message(f"others on this machine can read a secret: chmod 600 {key}")
        announcer.print_message(f"starting {settled.serve.model}; logs in {folder.path / 'logs'}")
        renewing = asyncio.create_task(certificates.renew_repeatedly())
        try:
            await supervisor.run(stop, lambda ready: _greet(ready, announcer, settled))
        finally:
            renewing.cancel()
    except (StartFailedError, AddressError, FolderError, StoreFailedError) as error:
        announcer.print_message(as_typed(str(error), settled.names))
        return _exit_code(error)
    except Exception as error:  # an internal error: everything has ended, and its traceback is kept
        announcer.print_message(f"ended by an internal error: {error!r}{_kept_traceback(folder)}")
        return EXIT_FAILED
    return 0


def _kept_traceback(folder: DataFolder) -> str:
    """Write the traceback of the error that is handled into a log. Returns words that say so, or none."""
    with suppress(OSError, FolderError):
        details = folder.log("serve")
        with details.open("a") as log:
            log.write(without_passwords(traceback.format_exc()))
        return f"; the traceback is in {details}"
    return ""


def _exit_code(error: Exception) -> int:
    """Exit code of a failed start."""
    if isinstance(error, StartFailedError):
        return error.exit_code
    return EXIT_FAILED if isinstance(error, StoreFailedError) else EXIT_USAGE


async def _greet(supervisor: Supervisor, announcer: Announcer, settled: Settled) -> None:
    num_workers, names = settled.serve.workers, settled.worker_names
    async with quire.AsyncClient(supervisor.address) as client:
        model, stats = await client.model(), await client.stats()
    blocks = stats.blocks
    num_late = num_workers - len(stats.workers)
    late = f"; {num_late} of {num_workers} workers are still starting" if num_late else ""
    each = f"; each of the {num_workers} workers" if num_workers > 1 else ""
    view = supervisor.progress.view
    slow = thread_warnings(settled.worker.threads, num_processors())
    lines = [
        *((("http", f"{supervisor.url}/v1 (OpenAI's API)"),) if supervisor.url else ()),
        ("model", f"{model.name} ({model.architecture}, {model.dtype}, up to {model.max_model_len} tokens)"),
        ("memory", f"{blocks.total} KV blocks of {blocks.block_size} tokens, {blocks.total_slots} tokens in all{late}"),
        *(("sampling", said) for said in sampling_defaults(model)),
        *((about, as_typed(notice, names) + (each if about == "takes" else "")) for about, notice in view.notices()),
        ("store", supervisor.store_name),
        *access_lines(settled.scheduler),
        *(("warning", as_typed(warning, names)) for warning in [*view.warnings(), *slow]),
        *first_lines(model, supervisor.address, settled.scheduler),
    ]
    headline = f"[bold green]Quire is ready[/bold green] at [bold]{escape(supervisor.address)}[/bold]"
    announcer.print_greeting(headline, lines)
