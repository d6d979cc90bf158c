"""Counts what a runner asks of the device while it launches a step: kernels, torch's operations, and reads.

The device is torch's `meta`, which has no content. Each operation of torch on it that is no view and makes more than
memory counts as one launch. Knows no runner.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MEMORY = ("empty", "new_empty", "_unsafe_view", "detach", "alias", "lift_fresh", "_reshape_alias")  # launch nothing
_READS = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__")


@dataclass(slots=True)
class StepCounter:
    """Counts while `counting`."""

    num_operations: int = 0
    num_reads: int = 0  # by the host, of values on the device: each waits for it

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count from zero."""
        self.num_operations = self.num_reads = 0
        with _Operations(self), _Reads(self):
            yield


class _Operations(TorchDispatchMode):
    def __init__(self, counter: StepCounter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        name = func.overloadpacket.__name__
        results = func(*args, **(kwargs or {}))
        is_on_device = any(each.is_meta for each in tree_leaves((args, results)) if isinstance(each, torch.Tensor))
        if is_on_device and not func.is_view and not name.startswith(_MEMORY):
            self._counter.num_operations += 1
        return results


class _Reads(TorchFunctionMode):
    def __init__(self, counter: StepCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            self._counter.num_reads += 1
        return func(*args, **(kwargs or {}))
