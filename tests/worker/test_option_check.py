"""Options that the machine or other options do not allow: refused before torch is imported, and no others."""

from dataclasses import replace

import pytest

from worker_svc.option_check import CheckedOptions, OptionError, check_options

USUAL = CheckedOptions(
    device="auto",
    runner="auto",
    dtype="auto",
    kv_dtype="auto",
    weight_dtype="auto",
    kernels="auto",
    block_size=16,
    num_blocks=None,
    kv_memory_bytes=None,
    memory_bytes=None,
    max_model_len=None,
)


@pytest.mark.parametrize(
    ("changes", "has_driver", "said"),
    [
        ({"device": "cuda"}, False, "--device cuda was asked for, but there is no CUDA driver"),
        ({"device": "cuda:1"}, False, "--device cuda:1 was asked for"),
        ({"kv_dtype": "fp8"}, False, "--kv-dtype fp8 needs the runner of an accelerator"),
        ({"kv_dtype": "fp8", "device": "cpu"}, True, "--kv-dtype fp8"),
        ({"kv_dtype": "fp8", "runner": "cpu", "device": "cpu"}, True, "--kv-dtype fp8"),
        (
            {"weight_dtype": "fp8"},
            False,
            "--weight-dtype fp8 needs the runner of an accelerator: leave it out, or give",
        ),
        ({"weight_dtype": "int4", "device": "cpu"}, True, "--weight-dtype int4 needs the runner of an accelerator"),
        ({"weight_dtype": "int4", "runner": "cpu"}, True, "--weight-dtype int4 needs the runner of an accelerator"),
        ({"weight_dtype": "fp8", "device": "cuda", "dtype": "float32"}, True, "fp8 makes products of 16 bits on a GPU"),
        ({"runner": "cpu", "device": "cuda"}, True, "--device is cuda: leave --runner out"),
        ({"kv_dtype": "int8", "device": "cuda"}, True, "--kv-dtype int8 needs the CPU's runner"),
        ({"kv_dtype": "int8", "runner": "device"}, False, "--kv-dtype int8"),
        ({"weight_dtype": "int8", "device": "cuda:0"}, True, "--weight-dtype int8"),
        ({"weight_dtype": "int8", "runner": "device", "device": "cpu"}, False, "--weight-dtype int8"),
        (
            {"kv_dtype": "int8", "kernels": "torch"},
            False,
            "int8 needs native kernels, and --kernels torch was given",
        ),
        ({"weight_dtype": "int8", "dtype": "float16"}, False, "--weight-dtype int8 needs native kernels"),
        ({"weight_dtype": "int8", "dtype": "float16", "device": "cpu"}, True, "there are none for --dtype float16"),
        ({"tensor_parallel": 2, "device": "cuda"}, True, "--tensor-parallel 2 divides a model among processes on CPUs"),
        ({"tensor_parallel": 2, "runner": "device"}, False, "give --device cpu and --runner cpu"),
        ({"num_blocks": 2, "max_model_len": 33}, False, "give --num-blocks 3 or more, or --max-model-len 32"),
    ],
)
def test_what_cannot_be_is_refused_by_the_names_of_options(
    changes: dict[str, object], has_driver: bool, said: str
) -> None:
    with pytest.raises(OptionError) as caught:
        check_options(replace(USUAL, **changes), has_driver=has_driver, has_kernels=True)  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_kernels_without_their_library_are_refused_where_a_device_was_asked_for() -> None:
    with pytest.raises(OptionError, match="Triton is missing"):
        check_options(replace(USUAL, device="cuda"), has_driver=True, has_kernels=False)
    check_options(replace(USUAL, device="cpu"), has_driver=True, has_kernels=False)


@pytest.mark.parametrize("has_driver", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"device": "cpu", "kv_dtype": "int8", "weight_dtype": "int8"},
        {"runner": "device", "kv_dtype": "fp8"},
        {"runner": "device", "weight_dtype": "fp8", "dtype": "float32"},
        {"runner": "device", "weight_dtype": "int4", "device": "cpu"},
        {"num_blocks": 2, "max_model_len": 32},
        {"num_blocks": 1},
        {"max_model_len": 10**9},
    ],
)
def test_what_can_be_passes(changes: dict[str, object], has_driver: bool) -> None:
    options = replace(USUAL, **changes)  # type: ignore[arg-type]
    check_options(options, has_driver=has_driver, has_kernels=has_driver)


def test_what_only_torch_can_tell_is_left_to_it() -> None:
    for options in (
        replace(USUAL, kv_dtype="fp8"),
        replace(USUAL, weight_dtype="fp8"),
        replace(USUAL, weight_dtype="int4"),
        replace(USUAL, kv_dtype="int8"),
        replace(USUAL, weight_dtype="int8"),
    ):
        check_options(options, has_driver=True, has_kernels=True)
