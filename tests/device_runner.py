"""Puts every worker of a test run on the runner of accelerators, as a plugin of pytest.

    python -m pytest -p tests.device_runner tests/e2e    `make test-device-runner` does so with all that starts workers

Without a GPU that runner computes with the torch references of its kernels: steps launched ahead, tokens that stay on
the device, blocks that move on a stream of their own. It is chosen by the setting's variable, which every process
started by a test inherits. Tests of what only the CPU's runner has are left out, each with its reason.
"""

import os
from collections.abc import Mapping

import pytest

VARIABLE = "QUIRE_WORKER_RUNNER"
_SERVE_START = "tests/quire/test_serve_start.py"

# By the beginning of a test's id.
LEFT_OUT: Mapping[str, str] = {
    "tests/e2e/test_int8_kv.py": "int8 keys and values need the CPU's native kernels, and a worker refuses them here",
    f"{_SERVE_START}::test_on_a_terminal_one_line_lives_and_warnings_of_workers_are_in_the_greeting": (
        "the warning is of a CPU's runner without native kernels"
    ),
    f"{_SERVE_START}::test_what_can_be_seen_before_a_model_is_loaded_is_refused_at_once[kv dtype]": (
        "fp8 keys and values, which are refused there, are served by this runner"
    ),
}


def pytest_configure() -> None:
    """Choose the runner before any process is started."""
    os.environ[VARIABLE] = "device"


def pytest_report_header() -> list[str]:
    """Say what is left out, and why."""
    return ["workers on the runner of accelerators", *(f"left out: {name}: {why}" for name, why in LEFT_OUT.items())]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out what cannot hold."""
    left_out = [item for item in items if item.nodeid.startswith(tuple(LEFT_OUT))]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
