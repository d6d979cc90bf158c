"""The stack of compose.yaml as a project of its own, so that nobody's containers or volumes are touched.

Brings services up and down and says how their containers are; knows nothing of requests.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.compose.engine import Engine, SmokeError
from tests.services import free_address

TAG = "smoke"
IMAGES = {service: f"quire-{service}:{TAG}" for service in ("scheduler", "gateway", "worker")}
_LABEL = "com.docker.compose"  # podman-compose sets the same
_POLL_S = 0.2
_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 40


@dataclass(frozen=True, slots=True)
class Container:
    """One container, of whatever state."""

    id: str
    name: str
    service: str

    @property
    def number(self) -> int:
        """Number among the containers of its service, from 1; compose removes the highest first."""
        return int(re.split("[-_]", self.name)[-1])


class Stack:
    """The services of compose.yaml on one engine."""

    def __init__(self, engine: Engine, project: str, env: Mapping[str, str]) -> None:
        """Take the name of the project, and variables of compose.yaml besides the addresses and the images' tag."""
        self.address = free_address()
        self.http_address = free_address()
        self._engine = engine
        self._project = project
        self._env = {**env, "QUIRE_TAG": TAG, "PUBLISH": self.address, "PUBLISH_HTTP": self.http_address}

    def build(self) -> None:
        """Build the images one by one: built at once, as podman-compose does, each compiles the same kernels."""
        for image in IMAGES:
            self._compose("build", image)

    def up(self, service: str, number: int = 1, **variables: str) -> None:
        """Start a service alone; containers of it that are there stay as they are.

        Args:
            service: name of the service.
            number: containers of it that run afterwards.
            variables: of compose.yaml, for the containers that are made now.
        """
        scaled = ("--scale", f"{service}={number}", service)
        self._compose("up", "-d", "--no-deps", "--no-build", "--no-recreate", *scaled, **variables)

    def tear_down(self) -> None:
        """Removes containers, volumes and networks. Raises SmokeError if anything is left."""
        self._compose("down", "--volumes", "--remove-orphans", "--timeout", "5")
        kinds = {"container": ("ps", "-aq"), "volume": ("volume", "ls", "-q"), "network": ("network", "ls", "-q")}
        for kind, command in kinds.items():
            left = self._engine.ask(*command, f"--filter=label={_LABEL}.project={self._project}")
            if left:
                raise SmokeError(f"left behind after teardown: {kind} {left}")

    def containers(self, service: str | None = None) -> list[Container]:
        """List the containers of one service, or of all."""
        filters = [f"--filter=label={_LABEL}.project={self._project}"]
        if service is not None:
            filters.append(f"--filter=label={_LABEL}.service={service}")
        ids = self._engine.ask("ps", "-aq", "--no-trunc", *filters).split()
        return [self._describe(each) for each in ids]

    def container_of(self, worker_id: str) -> Container:
        """The container of a worker; its id begins with its host name."""
        host = worker_id.partition(":")[0]
        return next(each for each in self.containers("worker") if each.id.startswith(host))

    def kill(self, container: Container) -> None:
        self._engine.ask("kill", "--signal=KILL", container.id)

    def stop(self, container: Container) -> None:
        """SIGTERM, and waits. Not by compose: podman-compose's `stop` knows no replicas added by --scale."""
        self._engine.ask("stop", f"--time={_STOP_TIMEOUT_S}", container.id)

    def remove(self, container: Container) -> None:
        """Removes a container that has ended, and its volumes without a name."""
        self._engine.ask("rm", "--volumes", container.id)

    def execute(self, container: Container, *command: str) -> int:
        """Exit code of a command inside."""
        return self._engine.run("exec", container.id, *command).returncode

    def exit_code(self, container: Container) -> int | None:
        """Exit code of a container; None while it runs."""
        state = self._inspect(container.id)["State"]
        return None if state["Running"] else int(state["ExitCode"])

    def is_healthy(self, container: Container) -> bool:
        """True if the image's health check passes. Podman runs it now, Docker by itself."""
        if self._engine.is_podman:
            return self._engine.run("healthcheck", "run", container.id).returncode == 0
        return bool(self._inspect(container.id)["State"]["Health"]["Status"] == "healthy")

    def has_logged(self, container: Container, event: str) -> bool:
        """True if the service has logged this event."""
        return f'"event": "{event}"' in self.logs(container)

    def logs(self, container: Container) -> str:
        result = self._engine.run("logs", container.id)
        return result.stdout + result.stderr

    def _describe(self, container_id: str) -> Container:
        found = self._inspect(container_id)
        return Container(container_id, found["Name"].lstrip("/"), found["Config"]["Labels"][f"{_LABEL}.service"])

    def _inspect(self, container_id: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(self._engine.ask("container", "inspect", container_id))
        return found[0]

    def _compose(self, *arguments: str, **variables: str) -> None:
        command = ["-p", self._project, "--profile", "cpu", *arguments]
        self._engine.run_compose(command, {**self._env, **variables})


def wait_until(what: str, is_so: Callable[[], bool], timeout_s: float = _START_TIMEOUT_S) -> None:
    """Poll until the condition holds. Raises SmokeError after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise SmokeError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(_POLL_S)
