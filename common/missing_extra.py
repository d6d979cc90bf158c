"""One line instead of a traceback where a service's process lacks a package of its extra, and none for Ctrl-C.

Import it in a service's `__main__`, before anything that an extra brings. It loads nothing but the standard library.
"""

import sys
import traceback
from types import TracebackType

from quire.install import install_hint

_EXTRAS = {"scheduler_svc": "scheduler", "worker_svc": "worker", "gateway_svc": "gateway"}
_OTHER_EXTRAS = {"triton": "gpu", "flashinfer": "flashinfer"}


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints the exception that ends this process, as the interpreter does but for a missing package and Ctrl-C.

    Ctrl-C arrives as an exception only until the service serves.
    """
    if issubclass(kind, KeyboardInterrupt):
        return
    service = _EXTRAS.get(_package())
    missing = error.name.partition(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else None
    if service is None or missing is None or missing in _OURS:
        traceback.print_exception(kind, error, trace)
        return
    hint = install_hint(_OTHER_EXTRAS.get(missing, service))
    print(f"{service}: needs {missing}; run {hint}", file=sys.stderr)  # noqa: T201 - for the person who started it


def _package() -> str:
    """Package that `python -m` was told to run, or an empty text."""
    spec = sys.modules["__main__"].__spec__
    return spec.parent or "" if spec is not None else ""


_OURS = ("common", "kernels", "quire", *_EXTRAS)

if _package() in _EXTRAS:
    sys.excepthook = report
