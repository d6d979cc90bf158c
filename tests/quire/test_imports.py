"""What importing the SDK brings: grpcio and protobuf, and nothing of the services or the command line."""

import json
import subprocess
import sys

HEAVY = ["torch", "transformers", "redis", "pydantic", "typer", "rich", "structlog", "tokenizers", "numpy", "jinja2"]
OURS = ["scheduler_svc", "worker_svc", "kernels"]


def modules_after(statement: str) -> set[str]:
    code = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout))


def test_the_sdk_needs_only_the_base_install() -> None:
    assert not modules_after("import quire").intersection(HEAVY + OURS)


def test_the_command_line_has_neither_torch_nor_redis_nor_the_services() -> None:
    loaded = modules_after("import quire.cli.app")
    assert "typer" in loaded
    assert not loaded.intersection(["torch", "redis", "transformers", *OURS])
