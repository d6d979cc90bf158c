"""Loading of the attention libraries, which only here are imported, and by name: none of them is a dependency."""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

from worker_svc.gpu.libraries.flash_attention import FlashAttention
from worker_svc.gpu.libraries.flashinfer import FlashInfer
from worker_svc.gpu.libraries.library import AttentionLibrary


class LibraryError(Exception):
    """Reason why a library that is installed cannot be used here."""


class _Source(NamedTuple):
    """Source of a library."""

    modules: tuple[str, ...]  # of which the first that is there has the interface
    distribution: str
    make: Callable[[Any, str], AttentionLibrary]


_SOURCES = {
    FlashInfer.name: _Source(("flashinfer",), "flashinfer-python", FlashInfer),
    FlashAttention.name: _Source(
        ("flash_attn_interface", "flash_attn_3.flash_attn_interface"), "flash-attn-3", FlashAttention
    ),
}
LIBRARY_NAMES = tuple(_SOURCES)  # as --attention says them


def load_library(name: str) -> AttentionLibrary:
    """Import an installed library. Raises LibraryError, whatever the import raises."""
    source = _SOURCES[name]
    module = next((each for each in source.modules if find_spec(each.partition(".")[0]) is not None), None)
    if module is None:
        raise LibraryError("it is not installed")
    try:
        return source.make(import_module(module), _version(source.distribution))
    except Exception as error:  # compiled for another torch, another device, or broken
        raise LibraryError(f"it cannot be imported: {type(error).__name__}: {error}") from error


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:  # built in place
        return "unknown"
