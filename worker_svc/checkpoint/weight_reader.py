"""The tensors of a checkpoint by name, from all its files, each checked before it is returned."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.checkpoint.weight_files import TensorHeader, check_tensor, weight_files


class WeightReader:
    """Reads tensors; a context manager, since it keeps the files open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}  # by tensor name; safetensors has no type for its handle

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for file in weight_files(self.folder):
                try:
                    handle = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
                except (SafetensorError, OSError) as error:
                    raise CheckpointError(f"{file} is damaged ({error}): download it again") from error
                self._handles.update(dict.fromkeys(handle.keys(), handle))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.clear()
        self._stack.close()

    @property
    def names(self) -> Sequence[str]:
        """Names of all tensors."""
        return tuple(self._handles)

    def __contains__(self, name: object) -> bool:
        return name in self._handles

    def read(self, name: str, shape: Sequence[int], part: Sequence[slice] = ()) -> Tensor:
        """The tensor, on the CPU and in the dtype of the file. Raises CheckpointError unless it has this shape.

        `part`: what to read of it, by dimension; only that is read from the file.
        """
        header = None
        if name in self._handles:
            stored = self._handles[name].get_slice(name)
            header = TensorHeader(self.folder.name, stored.get_dtype(), tuple(stored.get_shape()))
        check_tensor(self.folder, name, header, shape)
        tensor: Tensor = stored[tuple(part)] if part else self._handles[name].get_tensor(name)
        return tensor
