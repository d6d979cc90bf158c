"""Configurations of sampling for the compile gate: large vocabularies, all dtypes of logits."""

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.gate.launch_config import LaunchConfig
from kernels.sampling import logit_penalties, token_choice, token_selection

_VOCAB_SIZE = 128_256
_TYPES = {
    "logit_rows_ptr": "*i32",
    "selecting_ptr": "*i32",
    "part_max_ptr": "*fp32",
    "part_id_ptr": "*i32",
    "part_flags_ptr": "*i32",
    "raw_flags_ptr": "*i32",
    "part_score_ptr": "*i64",
    "part_sums_ptr": "*i64",
    "progress_ptr": "*i32",
    "temperature_ptr": "*fp32",
    "threshold_ptr": "*fp32",
    "top_k_ptr": "*i32",
    "top_p_ptr": "*i64",
    "key_ptr": "*i64",
    "depths_ptr": "*i32",
    "token_ids_ptr": "*i32",
    "valid_ptr": "*u1",
    "logit_row_ptr": "*i32",
    "seat_ptr": "*i32",
    "length_ptr": "*i32",
    "num_prompt_ptr": "*i32",
    "penalty_ptr": "*fp32",
    "token_table_ptr": "*i32",
    "counts_ptr": "*i32",
    "stride_table": "i32",
    "stride_logits": "i32",
    "vocab_size": "i32",
    "part_size": "i32",
}
_ALIGNED = ("stride_logits", "vocab_size", "part_size")


def _launch(
    name: str,
    kernel: Any,
    constants: Mapping[str, object],
    *,
    logits: str = "bf16",
    num_warps: int,
    wide_loads: bool = True,
) -> LaunchConfig:
    types = {"logits_ptr": f"*{logits}", **_TYPES}
    if not constants.get("DRAWN", True):
        types["part_score_ptr"] = "*fp32"  # unused, and another in its place
    return LaunchConfig(
        name=f"{name} {logits}",
        kernel=kernel,
        arguments={name: types[name] for name in kernel.arg_names if name in types},
        constants=constants,
        divisible_by_16=tuple(name for name in _ALIGNED if name in kernel.arg_names),
        num_warps=num_warps,
        wide_loads=wide_loads,
        float64=False,
    )


def _choices(logits: str, num_samples: int) -> tuple[LaunchConfig, ...]:
    """Launches for samples of which some are drawn at random; float32 logits are edited ones."""
    parts, _ = token_choice.split(num_samples, _VOCAB_SIZE)
    constants = {"INDEXED": logits != "fp32", "PARTS": parts}
    tiled = constants | {"TILE": token_choice.TILE}
    summing = {"INDEXED": logits != "fp32", "MAXIMA": parts}
    summing |= {"TILE": token_selection.SELECT_TILE, "WAYS": token_selection.WAYS}
    selecting = summing | {"MOST_PARTS": token_selection.MOST_PARTS}
    finish = {"EDITED": logits == "fp32", "DRAWN": True, "PARTS": parts}
    greedy = finish | {"DRAWN": False}
    warps = token_choice.NUM_WARPS
    return (
        _launch(f"row maxima x{parts}", token_choice.row_maxima_kernel, tiled, logits=logits, num_warps=warps),
        _selection(f"sums x{parts}", token_selection.sum_kernel, summing, logits),
        _selection(f"top-k, top-p x{parts}", token_selection.select_kernel, selecting, logits),
        _launch(f"draw x{parts}", token_choice.draw_kernel, tiled, logits=logits, num_warps=warps),
        _launch(f"finish x{parts}", token_choice.finish_kernel, finish, logits=logits, num_warps=1, wide_loads=False),
        _launch(f"argmax x{parts}", token_choice.finish_kernel, greedy, logits=logits, num_warps=1, wide_loads=False),
    )


def _selection(name: str, kernel: Any, constants: Mapping[str, object], logits: str) -> LaunchConfig:
    """Launch of a selection, with 4 logits for each thread."""
    warps = token_selection.SELECT_WARPS
    return _launch(name, kernel, constants, logits=logits, num_warps=warps, wide_loads=logits == "fp32")


def _penalty(name: str, kernel: Any) -> LaunchConfig:
    """Launch of a penalty. Rows of the token table have any alignment, and tokens are accessed one by one."""
    warps = logit_penalties.NUM_WARPS
    return _launch(name, kernel, {"TILE": logit_penalties.TILE}, logits="fp32", num_warps=warps, wide_loads=False)


SAMPLINGS = (
    *_choices("bf16", 256),
    *_choices("fp16", 1),
    *_choices("fp32", 16),
    _penalty("count history", logit_penalties.count_kernel),
    _penalty("penalise", logit_penalties.penalise_kernel),
)
