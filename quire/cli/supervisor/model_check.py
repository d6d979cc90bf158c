"""Runs a worker's checks of model and options in a process of their own, before anything else is started.

A damaged model folder that crashes a library, or makes it loop for ever, affects only that process.
"""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

from quire.cli.supervisor.child import StartFailedError, module_command
from quire.cli.supervisor.service_log import last_line
from quire.exit_code import EXIT_CONFIGURATION
from quire.typed_names import as_typed
from quire.worker_settings import WorkerSettings

LIMIT_S = 60.0  # a good folder takes 0.1 s; one of many files on a slow disk a few seconds
_CHECKED = (
    "model", "generation_config", "device", "runner", "dtype", "kv_dtype", "weight_dtype", "kernels", "attention",
    "block_size", "num_blocks", "kv_memory_bytes", "memory_bytes", "max_model_len",
    "tensor_parallel", "group_address", "rank", "worker_number",
)  # fmt: skip


async def check_model(
    settings: WorkerSettings,
    environment: Mapping[str, str],
    limit_s: float = LIMIT_S,
    names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raises StartFailedError with one sentence if a worker cannot serve the model with these settings.

    `names`: names under which the settings were given, by field.
    """
    values = json.dumps({name: getattr(settings, name) for name in _CHECKED})
    checking = await asyncio.create_subprocess_exec(
        *module_command("worker_svc.start.preflight_process", values),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        process_group=0,
    )
    try:
        async with asyncio.timeout(limit_s):
            _, said = await checking.communicate()
    except TimeoutError:
        raise StartFailedError(
            f"the check of {settings.model} did not end within {limit_s:g} s: check that its disk works, or download "
            "the checkpoint again",
            EXIT_CONFIGURATION,
        ) from None
    finally:
        if checking.returncode is None:
            with suppress(ProcessLookupError):
                checking.kill()
            await checking.communicate()
    if checking.returncode == EXIT_CONFIGURATION:
        raise StartFailedError(as_typed(last_line(said), names), EXIT_CONFIGURATION)
    if checking.returncode:
        ended = f"killed by signal {-checking.returncode}" if checking.returncode < 0 else last_line(said)
        raise StartFailedError(
            f"the check of {settings.model} failed ({ended}): download the checkpoint again", EXIT_CONFIGURATION
        )
