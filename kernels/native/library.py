"""The compiled library as typed functions: loading it, and the arguments of each function.

Knows addresses and counts, no tensors.
"""

from collections.abc import Mapping, Sequence
from ctypes import CDLL, PyDLL, Structure, c_int, c_int32, c_int64, c_void_p
from typing import Any

from kernels.native.build import library_path
from kernels.native.compiling import NativeUnavailableError

_PLAN = c_void_p


class CacheMemory(Structure):
    """`Cache` of src/cache.h."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_block_stride", c_int64),
        ("value_block_stride", c_int64),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("half", c_int32),
        ("int8", c_int32),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "quire_lanes": (c_int, ()),
    "quire_plan_new": (_PLAN, ()),
    "quire_plan_delete": (None, (_PLAN,)),
    "quire_plan_num_units": (c_int64, (_PLAN,)),
    "quire_plan_fill": (
        None,
        (_PLAN, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int, c_int),
    ),
    "quire_run": (None, (c_void_p, c_int64, c_void_p, c_int)),
    "quire_choose_tokens": (None, (c_void_p, c_int)),
    "quire_rank_tokens": (None, (c_void_p, c_int)),
    "quire_token_logprobs": (None, (c_void_p, c_int)),
    "quire_ranks_bytes": (c_int64, (c_int, c_int64)),
    "quire_ranks_new": (c_void_p, (c_void_p, c_int, c_int, c_int64, c_int64, c_int64)),
    "quire_ranks_delete": (None, (c_void_p,)),
    "quire_ranks_failed": (c_int, (c_void_p,)),
    "quire_ranks_fail": (None, (c_void_p,)),
    "quire_ranks_nanoseconds": (c_int64, (c_void_p,)),
    "quire_ranks_waited_nanoseconds": (c_int64, (c_void_p,)),
}


# These take microseconds, so they keep the interpreter's lock: getting it back may take longer.
_QUICK = ("quire_plan_fill",)


def load_library(environment: Mapping[str, str], flags: Sequence[str] = ()) -> CDLL:
    """Load the library, compiled if necessary. Raises NativeUnavailableError, with the reason."""
    path = library_path(environment, flags)
    try:
        library = CDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(f"the compiled kernels do not load: {error}") from error
    for name in _QUICK:
        setattr(library, name, getattr(PyDLL(str(path)), name))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
