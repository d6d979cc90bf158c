"""The Valkey of a chaos run: that of the tests, which can also be asked whether it runs."""

from typing import Self

from tests.valkey import ValkeyProcess


class ChaosStore(ValkeyProcess):
    """Killed and started again by scenarios, in any order."""

    def __enter__(self) -> Self:
        self.start()
        return self

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def revive(self) -> None:
        """Starts it again on its files, unless it runs."""
        if self._process is not None and not self.is_running:
            self.kill()
        if self._process is None:
            self.start()
