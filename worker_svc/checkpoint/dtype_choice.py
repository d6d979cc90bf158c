"""Chooses the dtype in which a checkpoint is computed; by default the fastest that the device has for it.

Decides from its arguments alone, and gives a reason. Dtypes have torch's names, but torch is not needed.
"""

from collections.abc import Mapping
from typing import NamedTuple

from worker_svc.checkpoint.weight_files import FLOATING_DTYPES, TensorHeader


class DtypeChoice(NamedTuple):
    """A dtype, and the reason for it in words."""

    dtype: str
    reason: str


def saved_dtype(of_config: str | None, headers: Mapping[str, TensorHeader]) -> str:
    """The dtype in which a checkpoint was saved: that of its config, else of its first tensor; float64 as float32."""
    if of_config is not None:
        return of_config
    stored = (FLOATING_DTYPES.get(headers[name].dtype) for name in sorted(headers))
    found = next((each for each in stored if each is not None), "float32")
    return "float32" if found == "float64" else found


def choose_dtype(asked: str, of_checkpoint: str, *, on_cpu: bool, bfloat16_by: str | None) -> DtypeChoice:
    """Chooses the dtype of weights and computation.

    Args:
        asked: the setting; "auto" leaves the choice to this function.
        of_checkpoint: the dtype in which it was saved.
        on_cpu: True if a CPU computes.
        bfloat16_by: the CPU's instruction set that multiplies bfloat16; None: it has none.
    """
    if asked != "auto":
        return DtypeChoice(asked, "asked for")
    if not on_cpu or of_checkpoint == "float32":
        return DtypeChoice(of_checkpoint, "the checkpoint's")
    if bfloat16_by is None:
        return DtypeChoice(
            "float32", f"this processor multiplies no {of_checkpoint}; --dtype bfloat16 takes half of the memory"
        )
    if of_checkpoint == "bfloat16":
        return DtypeChoice("bfloat16", f"the checkpoint's, which this processor multiplies ({bfloat16_by})")
    return DtypeChoice(
        "bfloat16",
        f"this processor multiplies bfloat16 ({bfloat16_by}), and {of_checkpoint} only slowly; "
        "--dtype float32 keeps every bit of the checkpoint",
    )
