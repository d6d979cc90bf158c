"""A deployment of processes on this machine: schedulers, workers, a gateway, and a Valkey with fsync on every write."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tests.scaling.deployment import NUM_SHARDS, End, Scaled
from tests.services import Service, free_address, start_gateway, start_scheduler, start_worker
from tests.valkey import ValkeyProcess

_SMALL = ("--threads", "1", "--dtype", "float32", "--kv-memory-bytes", str(64 * 2**20))
_NUM_LINES = 25  # of a log


class Processes:
    """Services as processes, in the order in which they were started."""

    name = "processes"

    def __init__(self, model: Path) -> None:
        self._model = model
        self._places = [free_address() for _ in range(NUM_SHARDS)]
        self.address = ",".join(self._places)
        self.http_address = ""
        self._stack = ExitStack()
        self._services: dict[str, list[Service]] = {"gateway": [], "scheduler": [], "worker": []}

    def start(self) -> None:
        self._store = self._stack.enter_context(ValkeyProcess())
        self.add("scheduler", 1)
        self.add("worker", 1)
        gateway, url = start_gateway(self.address)
        self._keep("gateway", gateway)
        self.http_address = url.removeprefix("http://")

    def add(self, service: Scaled, number: int) -> None:
        for index in range(len(self._services[service]), number):
            if service == "worker":
                self._keep(service, start_worker(self.address, *_SMALL, model=self._model))
                continue
            flags = ("--store", self._store.url, "--shards", str(NUM_SHARDS))
            self._keep(service, start_scheduler(*flags, listen=self._places[index])[0])

    def remove(self, service: Scaled, number: int) -> list[End]:
        return self._stop(service, number)

    def end(self) -> list[End]:
        return [end for service in ("gateway", "scheduler", "worker") for end in self._stop(service, 0)]

    def describe(self) -> str:
        found = []
        for name, services in self._services.items():
            for index, service in enumerate(services):
                found += [f"--- {name} {index + 1}", *map(str.rstrip, service.raw[-_NUM_LINES:])]
        return "\n".join(found)

    def close(self) -> None:
        self._stack.close()

    def _keep(self, name: str, service: Service) -> None:
        self._services[name].append(self._stack.enter_context(service))

    def _stop(self, name: str, number: int) -> list[End]:
        surplus = list(enumerate(self._services[name]))[number:]
        with ThreadPoolExecutor(len(surplus)) as threads:
            ends = list(threads.map(lambda each: _stop(f"{name} {each[0] + 1}", each[1]), surplus))
        del self._services[name][number:]
        return ends


def _stop(name: str, service: Service) -> End:
    began_s = time.monotonic()
    service.signal(signal.SIGTERM)
    code = service.wait()
    return End(name, time.monotonic() - began_s, code)
