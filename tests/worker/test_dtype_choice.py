"""Default dtype of a served checkpoint."""

import pytest

from kernels.native.processor import processor_features
from worker_svc.checkpoint.dtype_choice import choose_dtype

CPU, CUDA = True, False  # whether it is a CPU
FLOAT32, BFLOAT16, FLOAT16 = "float32", "bfloat16", "float16"


@pytest.mark.parametrize(
    ("of_checkpoint", "on_cpu", "bfloat16_by", "dtype", "reason"),
    [
        (FLOAT32, CPU, "AMX", FLOAT32, "the checkpoint's"),
        (FLOAT32, CPU, None, FLOAT32, "the checkpoint's"),
        (BFLOAT16, CPU, "AVX-512 BF16", BFLOAT16, "the checkpoint's, which this processor multiplies (AVX-512 BF16)"),
        (BFLOAT16, CPU, None, FLOAT32, "this processor multiplies no bfloat16; --dtype bfloat16 takes half of"),
        (FLOAT16, CPU, "NEON BF16", BFLOAT16, "float16 only slowly; --dtype float32 keeps every bit"),
        (FLOAT16, CPU, None, FLOAT32, "this processor multiplies no float16"),
        (FLOAT16, CUDA, "AMX", FLOAT16, "the checkpoint's"),
        (BFLOAT16, CUDA, None, BFLOAT16, "the checkpoint's"),
    ],
)
def test_it_is_the_fastest_that_the_processor_has_for_the_checkpoint_and_why_is_said(
    of_checkpoint: str, on_cpu: bool, bfloat16_by: str | None, dtype: str, reason: str
) -> None:
    choice = choose_dtype("auto", of_checkpoint, on_cpu=on_cpu, bfloat16_by=bfloat16_by)
    assert choice.dtype == dtype
    assert reason in choice.reason


@pytest.mark.parametrize("asked", [FLOAT32, BFLOAT16, FLOAT16])
def test_a_dtype_that_was_asked_for_is_taken(asked: str) -> None:
    assert choose_dtype(asked, BFLOAT16, on_cpu=True, bfloat16_by="AMX") == (asked, "asked for")


def test_this_processor_has_features() -> None:
    assert {"avx2", "asimd"} & processor_features()
