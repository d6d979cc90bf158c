"""The container engine of this machine: Docker with its compose plugin, or podman with podman-compose.

Runs their commands; knows nothing of images or services.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Limits low enough for an engine that may not raise them, and the runtime that starts where crun refuses a mix of
# cgroup versions.
_PODMAN_CONFIG = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
"""
_NO_ENGINE = """\
no container engine answers. Either of these is needed:
  - Docker: `docker info` and `docker compose version` must succeed;
  - podman (4 or later) and podman-compose, both on PATH: see "Containers" in CONTRIBUTING.md."""


class SmokeError(Exception):
    """The smoke test cannot go on; the message says why."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Commands of one engine, run with `env` on top of this process's environment."""

    command: tuple[str, ...]
    compose: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_podman(self) -> bool:
        return self.command == ("podman",)

    def ask(self, *arguments: str) -> str:
        """Output of an engine's command. Raises SmokeError if it fails."""
        result = self.run(*arguments)
        if result.returncode != 0:
            raise SmokeError(f"{_spelled(result.args)} exits with {result.returncode}:\n{result.stderr[-4000:]}")
        return result.stdout.strip()

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs an engine's command to its end, whatever its exit code, and keeps what it prints."""
        return subprocess.run([*self.command, *arguments], capture_output=True, text=True, env=self._environment())

    def run_compose(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        """Runs a compose command; what it prints is shown only if it fails. Raises SmokeError then."""
        command = [*self.compose, *arguments]
        result = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**self._environment(), **env},
        )
        if result.returncode != 0:
            raise SmokeError(f"{_spelled(command)} exits with {result.returncode}:\n{result.stdout[-8000:]}")

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.env}


def find_engine(scratch: Path) -> Engine:
    """The engine to use; `scratch` is a folder for its configuration. Raises SmokeError if there is none."""
    if _succeeds("docker", "info") and _succeeds("docker", "compose", "version"):
        return Engine(("docker",), ("docker", "compose"))
    if shutil.which("podman") and shutil.which("podman-compose"):
        return Engine(("podman",), ("podman-compose", "--in-pod=false"), _podman_env(scratch))
    raise SmokeError(_NO_ENGINE)


def say(text: str) -> None:
    """One line of progress."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _podman_env(scratch: Path) -> dict[str, str]:
    """The docker format keeps HEALTHCHECK, which OCI images have no place for. What the user has set is kept."""
    env = {"BUILDAH_FORMAT": "docker"}
    if "CONTAINERS_CONF" not in os.environ:
        runtime = 'runtime = "runc"\n' if shutil.which("runc") else ""
        config = scratch / "containers.conf"
        config.write_text(_PODMAN_CONFIG + runtime)
        env["CONTAINERS_CONF"] = str(config)
    if "BUILDAH_ISOLATION" not in os.environ:
        env["BUILDAH_ISOLATION"] = "chroot"
    return env


def _succeeds(*command: str) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0


def _spelled(command: Sequence[str]) -> str:
    return f"`{' '.join(command)}`"
