"""Arrays of a batch with chunks of prompts, at fixed places of the step's upload, so that a graph can read them.

Rows of one token come first, then those of several; each row has its place in every array. A batch may be padded with
tokens, rows and work that attention skips. Knows no model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.attention.decode_reference import DecodeRows
from kernels.attention.prefill_plan import NO_ROW, WORK_FIELDS
from kernels.attention.prefill_reference import PrefillRows
from kernels.layers.step_inputs_reference import StepInputs
from worker_svc.gpu.batch_layout import BatchLayout
from worker_svc.steps.step_check import StepRows
from worker_svc.steps.step_upload import StepUpload

PADDING = -1  # the position of a padding token or row


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSize:
    """Extent of a batch, with its padding."""

    num_tokens: int
    num_rows: int
    num_decode: int  # leading rows, and tokens, that decode attention looks at
    num_work: int  # of prefill attention


def mixed_arrays(max_rows: int, max_work: int, num_windows: int) -> Mapping[str, tuple[int, torch.dtype]]:
    """Lengths and dtypes of the arrays beside the tokens' own, by name. Each sliding window has its own work."""
    lengths = {
        "row_seats": max_rows,
        "row_positions": max_rows,  # of each row's last token
        "decode_lens": max_rows,  # context of rows of one token; 0 for others
        "query_start": max_rows + 1,
        **dict.fromkeys(work_names(num_windows), max_work * WORK_FIELDS),
    }
    return {name: (length, torch.int32) for name, length in lengths.items()}


def work_names(num_windows: int) -> list[str]:
    """Names of the arrays of prefill attention's work, by window."""
    return [f"prefill_work_{window}" for window in range(num_windows)]


def put_mixed(
    upload: StepUpload,
    rows: StepRows,
    layout: BatchLayout,
    work: Sequence[npt.NDArray[np.int32]],
    size: MixedSize,
) -> None:
    """Add a batch to the step's upload, padded to `size`.

    work: [num_work, 6] of each window, of the rows in the layout's order
    """
    seats, ends = rows.seats[layout.order], rows.ends[layout.order]
    decode_lens = np.where(np.arange(len(ends)) < layout.num_decode, ends, 0)
    query_start = np.zeros(len(ends) + 1, dtype=np.int32)
    np.cumsum(rows.num_tokens[layout.order], out=query_start[1:])
    put_padded(upload, "row_seats", seats, size.num_rows, 0)
    put_padded(upload, "row_positions", ends - 1, size.num_rows, PADDING)
    put_padded(upload, "decode_lens", decode_lens, size.num_decode, 0)
    put_padded(upload, "query_start", query_start, size.num_rows + 1, int(query_start[-1]))
    for name, fields in zip(work_names(len(work)), work, strict=True):
        put_padded(upload, name, fields.ravel(), size.num_work * WORK_FIELDS, NO_ROW)


def put_padded(upload: StepUpload, name: str, values: npt.NDArray[np.integer], length: int, padding: int) -> None:
    """Set the first `length` elements of a fixed array to the values, and then to the padding."""
    padded = np.full(length, padding, dtype=np.int32)
    padded[: min(length, len(values))] = values[:length]
    upload.put(name, padded)


@dataclass(frozen=True, slots=True)
class MixedRows:
    """Views of the arrays on the device, and of the rows' inputs, which are gathered from them."""

    seats: Tensor  # [R]
    positions: Tensor  # [R]
    inputs: StepInputs  # of rows, as if each were its last token
    decode: DecodeRows
    prefill: PrefillRows
    work: Sequence[Tensor]  # [num_work, 6] of each window


def mixed_rows(fixed: Mapping[str, Tensor], row_inputs: StepInputs, size: MixedSize, num_windows: int) -> MixedRows:
    """Views for a batch of this size; `row_inputs` have room for its rows."""
    inputs = row_inputs.first(size.num_rows, size.num_rows)
    tables = inputs.block_tables
    return MixedRows(
        seats=fixed["row_seats"][: size.num_rows],
        positions=fixed["row_positions"][: size.num_rows],
        inputs=inputs,
        decode=DecodeRows(fixed["decode_lens"][: size.num_decode], tables[: size.num_decode]),
        prefill=PrefillRows(fixed["query_start"][: size.num_rows + 1], inputs.context_lens, tables),
        work=[fixed[name][: size.num_work * WORK_FIELDS].view(-1, WORK_FIELDS) for name in work_names(num_windows)],
    )
