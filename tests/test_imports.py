"""Modules that a process really loads: each service's own, and none that it must never import."""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEVER = {
    "quire.public": (
        "torch",
        "transformers",
        "redis",
        "common",
        "protos",
        "scheduler_svc",
        "worker_svc",
        "gateway_svc",
        "structlog",
        "typer",
    ),
    "gateway_svc.__main__": ("torch", "transformers", "redis", "scheduler_svc", "worker_svc", "kernels", "typer"),
    "scheduler_svc.__main__": ("torch", "transformers", "triton", "kernels", "worker_svc", "gateway_svc", "typer"),
    "worker_svc.__main__": ("torch", "transformers", "numpy", "redis", "scheduler_svc", "jinja2", "triton", "typer"),
    "worker_svc.process": ("redis", "scheduler_svc", "jinja2", "triton", "typer"),
    "worker_svc.gpu.torch_operations": ("triton", "redis", "scheduler_svc"),
    "kernels.attention.paged_attention": ("common", "grpc", "redis", "worker_svc", "scheduler_svc", "quire"),
    "kernels.sampling.sampling": ("common", "grpc", "redis", "worker_svc", "scheduler_svc", "quire"),
    "scheduler_svc.core.scheduler": ("asyncio", "grpc", "google", "redis", "structlog", "quire", "common"),
}


@pytest.mark.parametrize("module", NEVER)
def test_a_module_never_loads_what_it_must_not_touch(module: str) -> None:
    program = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert loaded.isdisjoint(NEVER[module])


def test_kernels_stays_a_docstring_so_that_nobody_takes_it_for_the_other_package_of_that_name() -> None:
    tree = ast.parse((ROOT / "kernels" / "__init__.py").read_text())
    assert [type(node) for node in tree.body] == [ast.Expr]


@pytest.mark.long
def test_transformers_imports_beside_our_kernels() -> None:
    program = "import kernels, transformers.modeling_utils; print(kernels.__file__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == ROOT / "kernels" / "__init__.py"


def test_our_version_is_none_that_transformers_takes_for_the_other_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    numbers = tuple(int(part) for part in version.split("."))
    assert not (0, 18, 2) <= numbers < (0, 20)
