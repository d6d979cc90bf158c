"""A tiny model on workers that look at several addresses, where the schedulers of one store come and go."""

from contextlib import ExitStack
from typing import Generic, Protocol, TypeVar

import pytest

from tests.e2e.model_site import ModelSite
from tests.services import Service, free_address, start_scheduler
from tests.worker.tiny_models import write_tiny_model


class SharedStore(Protocol):
    """Store that schedulers share."""

    @property
    def url(self) -> str:
        """URL for `--store`."""


StoreKind = TypeVar("StoreKind", bound=SharedStore)


class SchedulerPlaces(ModelSite, Generic[StoreKind]):
    """`places`: addresses of three schedulers; `address` has all of them, which workers and clients know."""

    def __init__(self, factory: pytest.TempPathFactory, stack: ExitStack, store: StoreKind, num_workers: int) -> None:
        super().__init__(write_tiny_model("llama_gqa", factory.mktemp("model"), seed=3))
        self.store = store
        self.places = [free_address() for _ in range(3)]
        self.address = ",".join(self.places)
        names = [f"w{number}" for number in range(num_workers)]
        self.workers = [stack.enter_context(self.start_worker(name, "--num-blocks", "600")) for name in names]

    def start_at(self, place: str, *flags: str) -> Service:
        """Start a scheduler there; another one that was there has ended."""
        return start_scheduler("--store", self.store.url, *flags, listen=place)[0]
