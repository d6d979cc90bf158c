"""The client SDK of Quire.

    >>> import quire
    >>> with quire.Client() as client:
    ...     print(client.generate("Once upon a time", max_tokens=32).text)

Knows only the wire. Its first use loads grpcio and protobuf, never torch or redis. Until then nothing is loaded, so
that services and the command line, which import other modules of this package, start without the SDK.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any


def _attribute(name: str) -> Any:
    """A submodule, or a public name; the first public name loads them all."""
    if name.isidentifier() and not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    if name == "__version__":
        return _version()
    if not name.startswith("__") or name == "__all__":  # others are what the interpreter and tools look for anywhere
        public = import_module(f"{__name__}.public")
        globals().update({each: getattr(public, each) for each in ("__all__", *public.__all__)})
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return globals()[name]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - takes longer than all the rest

    try:
        return version("quire-llm")
    except PackageNotFoundError as error:
        raise AttributeError("Quire is not installed, so its version is not known", name="__version__") from error


def _names() -> list[str]:
    """The names that completion shows."""
    return sorted({*_attribute("__all__"), "__version__", *(each for each in globals() if each.startswith("__"))})


if TYPE_CHECKING:  # a type checker knows the names, and that there are no others
    from quire.public import *  # noqa: F403
    from quire.public import __all__ as __all__

    __version__: str
else:
    __getattr__, __dir__ = _attribute, _names  # PEP 562
