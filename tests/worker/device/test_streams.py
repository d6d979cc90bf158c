"""Events of a GPU that is not the process's first, used by any thread: with torch's calls noted, without a GPU."""

from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from worker_svc.steps.streams import DeviceEvent

SECOND = torch.device("cuda:1")


class NotedCuda:
    """Torch's module of CUDA: notes each call with the current device of its thread, which is the first one."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, torch.device]] = []
        self.current = torch.device("cuda:0")
        self.options: dict[str, bool] = {}

    def Event(self, **options: bool) -> SimpleNamespace:
        self.options = options
        return SimpleNamespace(
            record=lambda stream: self.calls.append(("record", stream.device)),
            synchronize=lambda: self.note("synchronize"),
            query=lambda: self.note("query") > 0,
            elapsed_time=lambda _other: self.note("elapsed_time"),
        )

    def note(self, name: str) -> float:
        self.calls.append((name, self.current))
        return 2.0

    def device(self, device: torch.device) -> "_Current":
        return _Current(self, device)

    def current_stream(self, device: torch.device | None = None) -> SimpleNamespace:
        where = device or self.current
        return SimpleNamespace(device=where, wait_event=lambda _event: self.calls.append(("wait_event", where)))


class _Current:
    def __init__(self, cuda: NotedCuda, device: torch.device) -> None:
        self._cuda, self._device = cuda, device

    def __enter__(self) -> None:
        self._before, self._cuda.current = self._cuda.current, self._device

    def __exit__(self, *_: object) -> None:
        self._cuda.current = self._before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> NotedCuda:
    noted = NotedCuda()
    for name in ("Event", "device", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(noted, name))
    return noted


def in_another_thread(task: Callable[[], object]) -> None:
    thread = Thread(target=task)
    thread.start()
    thread.join()


def test_every_call_is_made_with_the_events_own_device(cuda: NotedCuda) -> None:
    """A call with another current device would open a context there, which takes hundreds of megabytes."""
    event, later = DeviceEvent(SECOND, timed=True), DeviceEvent(SECOND, timed=True)
    for task in (event.record, event.synchronize, event.is_reached, event.hold_stream):
        in_another_thread(task)
    in_another_thread(lambda: later.nanoseconds_since(event))
    names = ["record", "synchronize", "query", "wait_event", "elapsed_time"]
    assert cuda.calls == [(name, SECOND) for name in names]
    assert cuda.current == torch.device("cuda:0")


def test_a_waiting_thread_sleeps(cuda: NotedCuda) -> None:
    DeviceEvent(SECOND)
    assert cuda.options == {"enable_timing": False, "blocking": True}
