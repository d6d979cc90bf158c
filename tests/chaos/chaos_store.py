"""The Valkey of a chaos run: that of the tests, which can also be asked whether it runs."""

import subprocess
from pathlib import Path
from typing import Self

from tests.patience import patient
from tests.valkey import ValkeyProcess

DISK_BYTES = 8 << 20
STOP_TIMEOUT_S = 20.0


class ChaosStore(ValkeyProcess):
    """Killed and started again by scenarios, in any order."""

    def __enter__(self) -> Self:
        self.start()
        return self

    @property
    def folder(self) -> Path:
        """Folder of its files."""
        return self._folder

    def stop(self) -> None:
        """End by SIGTERM: cleanly, and its files stay."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(patient(STOP_TIMEOUT_S))
        self._process = None

    def revive(self) -> None:
        """Starts it again on its files, unless it runs."""
        if self._process is not None and not self.is_running:
            self.kill()
        if self._process is None:
            self.start()


class SmallDiskStore(ChaosStore):
    """Store on a file system of a few megabytes, which can be filled. Mounting needs root."""

    def start(self) -> None:
        if not self.folder.is_mount():
            command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self.folder)]
            subprocess.run(command, check=True)
        super().start()

    def fill(self) -> None:
        """Fill the rest of the file system."""
        with (self.folder / "filling").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 12))
            except OSError:
                pass

    def make_room(self) -> None:
        (self.folder / "filling").unlink()

    def close(self) -> None:
        if self.is_running:
            self.kill()
        if self.folder.is_mount():
            subprocess.run(["umount", str(self.folder)], check=True)
        super().close()
