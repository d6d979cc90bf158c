"""In which dtype a checkpoint is computed where nobody asked for one: the fastest that the device has for it.

Decides, and says why; looks at nothing.
"""

from typing import NamedTuple

import torch


class DtypeChoice(NamedTuple):
    """A dtype, and why it is this one, for people."""

    dtype: torch.dtype
    reason: str


def choose_dtype(
    asked: torch.dtype | None, of_checkpoint: torch.dtype, device: torch.device, bfloat16_by: str | None
) -> DtypeChoice:
    """Settles the dtype of weights and computation.

    Args:
        asked: None: nobody did.
        of_checkpoint: as its config says.
        device: where it is computed.
        bfloat16_by: the CPU's instruction set that multiplies bfloat16; None: it has none.
    """
    if asked is not None:
        return DtypeChoice(asked, "asked for")
    if device.type != "cpu" or of_checkpoint == torch.float32:
        return DtypeChoice(of_checkpoint, "the checkpoint's")
    if bfloat16_by is None:
        return DtypeChoice(
            torch.float32,
            f"this processor multiplies no {_name(of_checkpoint)}; --dtype bfloat16 takes half of the memory",
        )
    if of_checkpoint == torch.bfloat16:
        return DtypeChoice(torch.bfloat16, f"the checkpoint's, which this processor multiplies ({bfloat16_by})")
    return DtypeChoice(
        torch.bfloat16,
        f"this processor multiplies bfloat16 ({bfloat16_by}), and {_name(of_checkpoint)} only slowly; "
        "--dtype float32 keeps every bit of the checkpoint",
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
