"""Interface of a deployment whose services are scaled, and the end of one of their processes. Starts nothing itself."""

from dataclasses import dataclass
from typing import Literal, Protocol

Scaled = Literal["scheduler", "worker"]

NUM_SHARDS = 3  # so many schedulers lead at once, each at least one
END_S = 40.0  # stop_grace_period of compose.yaml


@dataclass(frozen=True, slots=True)
class End:
    """End of a container or process that was told to end by SIGTERM."""

    name: str
    time_s: float
    exit_code: int | None


class Deployment(Protocol):
    """A store, a gateway, one scheduler and one worker, once started; `address` has the places of all schedulers."""

    name: str
    address: str
    http_address: str

    def start(self) -> None:
        """Start one of each service."""

    def add(self, service: Scaled, number: int) -> None:
        """Start as many more as make this number; waits for none to be ready."""

    def remove(self, service: Scaled, number: int) -> list[End]:
        """End all but this number, all at once, by SIGTERM; the first ones stay, as with compose."""

    def end(self) -> list[End]:
        """End what runs, services before the store."""

    def describe(self) -> str:
        """Last lines of the logs, to show a cause."""

    def close(self) -> None:
        """Leave nothing behind."""
