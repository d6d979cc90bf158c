"""Graphs without a GPU: what a pass calls while it is captured is recorded, and called again at a replay.

As in a CUDA graph nothing of Python is left: every number is that of the capture, and every tensor has the address that
it had. A value that is read on the host cannot be captured. Uninitialised memory is NaN at each replay.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.sampling.sampling_operations import SamplingOperations
from worker_svc.operations import Operations

_UNINITIALISED = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call, and the tensors that later calls read its results from."""

    function: Callable[..., object]
    arguments: tuple[object, ...]
    named: dict[str, object]
    results: object

    def repeat(self) -> None:
        """Call again, with the results in the same tensors."""
        new = self.function(*self.arguments, **self.named)
        for fixed, fresh in zip(_tensors(self.results), _tensors(new), strict=True):
            if self.function in _UNINITIALISED:
                _poison(fixed)
            elif fixed.data_ptr() != fresh.data_ptr():
                fixed.copy_(fresh)


class RecordedGraph:
    """The calls of one capture."""

    def __init__(self, calls: list[_Call]) -> None:
        self._calls = calls

    def replay(self) -> None:
        """Call all again, in order."""
        for call in self._calls:
            call.repeat()


class RecordedGraphs(TorchDispatchMode):
    """Captures by recording. The captured pass must take its operations from `operations`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[_Call] | None = None  # of the capture in progress, outside of operations
        self._stand_ins: Operations | None = None
        self.num_captured = 0

    def capture(self, run: Callable[[], None]) -> RecordedGraph:
        """See GraphMaker.capture."""
        calls: list[_Call] = []
        self._calls = calls
        try:
            with self:
                run()
        finally:
            self._calls = None
        self.num_captured += 1
        return RecordedGraph(calls)

    def operations(self, bundle: Operations) -> Operations:
        """The same operations, each recorded as one call whatever it does inside, as a kernel is."""
        kept: dict[str, Any] = {
            each.name: self.recorded(getattr(bundle, each.name), each.name) for each in fields(bundle)
        }
        kept["sampling"] = bundle.sampling
        assert isinstance(bundle.sampling, SamplingOperations)
        return Operations(**kept)

    @contextmanager
    def standing_in(self, bundle: Operations) -> Iterator[None]:
        """Operations of another bundle compute, and those that are stood for are recorded: a capture's results are of
        padding, and a GPU computes none.
        """
        self._stand_ins = bundle
        try:
            yield
        finally:
            self._stand_ins = None

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        named = kwargs or {}
        results = func(*args, **named)
        if self._calls is not None:
            assert isinstance(results, Tensor | tuple | list), f"{func} reads a value on the host in a captured pass"
            if func in _UNINITIALISED:
                _poison(results)
            self._calls.append(_Call(func, args, named, results))
        return results

    @property
    def is_capturing(self) -> bool:
        return self._calls is not None

    def recorded(self, operation: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
        """The same operation, recorded as one call whatever it does inside. `name`: its field in `Operations`."""

        def recorded(*arguments: object, **named: object) -> object:
            computing = operation if name is None else getattr(self._stand_ins, name, operation)
            with self._paused() as calls:
                results = computing(*arguments, **named)
            if calls is not None:
                calls.append(_Call(operation, arguments, named, results))
            return results

        return recorded

    @contextmanager
    def _paused(self) -> Iterator[list[_Call] | None]:
        calls, self._calls = self._calls, None
        try:
            yield calls
        finally:
            self._calls = calls


def _tensors(results: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]


def _poison(results: object) -> None:
    for tensor in _tensors(results):
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
