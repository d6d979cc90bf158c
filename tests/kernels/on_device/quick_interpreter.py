"""Triton's interpreter without work that it repeats or that a GPU does not do, as a plugin of pytest.

At every call of a device function it prepares `triton.language` anew, which takes a third of its time. Within a launch
once is enough: what it changes stays until the launch ends. Of the rest a third are checks of every sum and product for
overflow, which compiled kernels lack: there, as here, a number that wraps gives a wrong result.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class Scope:
    """Scope of one preparation's changes, until `restore`, which ends a launch."""

    def __init__(self, changes: Any, prepared: set[frozenset[int]]) -> None:
        self._changes = changes
        self._prepared = prepared

    def restore(self) -> None:
        self._prepared.clear()
        self._changes.restore()


class PrepareOnce:
    """Replacement of the interpreter's preparation of modules: skips those that this launch has prepared."""

    def __init__(self, prepare: Callable[[Any], Any]) -> None:
        self._prepare = prepare
        self._prepared: set[frozenset[int]] = set()

    def __call__(self, function: Any) -> Scope | None:
        modules = frozenset(id(each) for each in function.__globals__.values() if each is tl or each is tl.core)
        if modules in self._prepared:
            return None
        self._prepared.add(modules)
        return Scope(self._prepare(function), self._prepared)


def looked_up_once(numpy_dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """NumPy's dtype of a Triton type, by the type of its elements, without building the table of all at each look."""
    known = cache(numpy_dtype_of)

    def look_up(triton_type: Any) -> Any:
        of_elements = triton_type.scalar
        return numpy_dtype_of(of_elements) if of_elements.is_ptr() else known(of_elements)

    return look_up


def pytest_configure() -> None:
    """Install the replacements before any kernel runs. Other versions of Triton keep their own way."""
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = PrepareOnce(interpreter._patch_lang)
        interpreter._get_np_dtype = looked_up_once(interpreter._get_np_dtype)
        builder = interpreter.interpreter_builder
        builder.options = replace(builder.options, sanitize_overflow=False)
