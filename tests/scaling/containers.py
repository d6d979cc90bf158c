"""A deployment of containers: compose.yaml as a project of its own.

`compose up --scale` adds. podman-compose does not remove what is beyond a smaller number, so here the surplus is
stopped and removed container by container, the highest number first to go, with SIGTERM and the grace period, as Docker
Compose does it.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.compose.engine import Engine
from tests.compose.images import SMALL_WORKERS, variables_of_images
from tests.compose.stack import Container, Stack, wait_until
from tests.scaling.deployment import NUM_SHARDS, End, Scaled
from tests.services import free_address

PROJECT = "quire-scale"
_NUM_LINES = 25  # of a log


class Containers:
    """Services of compose.yaml on one engine."""

    name = "containers"

    def __init__(self, engine: Engine, model: Path) -> None:
        variables = {"MODEL": str(model), "QUIRE_SCHEDULER_SHARDS": str(NUM_SHARDS)}
        self._stack = Stack(engine, PROJECT, {**variables_of_images(engine), **SMALL_WORKERS, **variables})
        # Each scheduler has a port of this machine of its own, as with a range of ports in PUBLISH.
        self._places = [self._stack.address, *(free_address() for _ in range(NUM_SHARDS - 1))]
        self.address = ",".join(self._places)
        self.http_address = self._stack.http_address

    def start(self) -> None:
        self._stack.build()
        self._stack.tear_down()  # of a run that could not
        for service in ("redis", "scheduler", "worker", "gateway"):
            self._stack.up(service)
        for container in self._stack.containers():
            wait_until(f"{container.name} is healthy", partial(self._stack.is_healthy, container))

    def add(self, service: Scaled, number: int) -> None:
        if service == "worker":
            self._stack.up(service, number)
            return
        for count in range(len(self._running(service)) + 1, number + 1):
            self._stack.up(service, count, PUBLISH=self._places[count - 1])

    def remove(self, service: Scaled, number: int) -> list[End]:
        surplus = self._running(service)[number:]
        with ThreadPoolExecutor(len(surplus)) as threads:
            ends = list(threads.map(self._stop, surplus))
        for container in surplus:
            self._stack.remove(container)
        return ends

    def end(self) -> list[End]:
        services = ("gateway", "scheduler", "worker", "redis")
        return [self._stop(container) for service in services for container in self._running(service)]

    def describe(self) -> str:
        found = []
        for container in self._stack.containers():
            lines = self._stack.logs(container).splitlines()[-_NUM_LINES:]
            found += [f"--- {container.name}, exit code {self._stack.exit_code(container)}", *lines]
        return "\n".join(found)

    def close(self) -> None:
        self._stack.tear_down()

    def _running(self, service: str) -> list[Container]:
        """Running containers of a service, by number."""
        containers = sorted(self._stack.containers(service), key=lambda each: each.number)
        return [each for each in containers if self._stack.exit_code(each) is None]

    def _stop(self, container: Container) -> End:
        began_s = time.monotonic()
        self._stack.stop(container)
        return End(container.name, time.monotonic() - began_s, self._stack.exit_code(container))
