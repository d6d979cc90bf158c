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
        (
            {"attention": "flashinfer"},
            True,
            "run pip install '.[flashinfer]' in a clone of Quire, or leave --attention",
        ),
        (
            {"attention": "flash-attn", "device": "cuda"},
            True,
            "needs FlashAttention-3 (the module flash_attn_interface",
        ),
        ({"attention": "triton"}, False, "--attention triton chooses kernels of a CUDA device"),
        ({"attention": "flashinfer", "device": "cpu"}, True, "are computed on cpu: leave --attention out, or give"),
        ({"num_blocks": 2, "max_model_len": 33}, False, "give --num-blocks 3 or more, or --max-model-len 32"),
    ],
)
def test_what_cannot_be_is_refused_by_the_names_of_options(
    changes: dict[str, object], has_driver: bool, said: str
) -> None:
    with pytest.raises(OptionError) as caught:
        check_options(replace(USUAL, **changes), has_driver=has_driver, has_kernels=True, libraries=())  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_kernels_without_their_library_are_refused_where_a_device_was_asked_for() -> None:
    with pytest.raises(OptionError, match="Triton is missing"):
        check_options(replace(USUAL, device="cuda"), has_driver=True, has_kernels=False, libraries=())
    check_options(replace(USUAL, device="cpu"), has_driver=True, has_kernels=False, libraries=())


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
    check_options(options, has_driver=has_driver, has_kernels=has_driver, libraries=())


@pytest.mark.parametrize(
    ("changes", "num_devices", "said"),
    [
        (
            {"device": "cuda"},
            2,
            "cuda:0 to cuda:3, and the last one is cuda:1: give at most --tensor-parallel 2, or start",
        ),
        (
            {"device": "cuda"},
            1,
            "--tensor-parallel 4 takes a CUDA device for each rank, .* the last one is cuda:0: leave it",
        ),
        ({"device": "cuda:2"}, 5, "cuda:2 to cuda:5, and the last one is cuda:4: give at most --tensor-parallel 3"),
        ({}, 3, "cuda:0 to cuda:3, and the last one is cuda:2"),
        ({"runner": "device"}, 3, "or start the ranks on several machines with --rank and --group-address"),
        ({"worker_number": 1}, 7, "cuda:4 to cuda:7, and the last one is cuda:6: give --workers 1 or less"),
        ({"worker_number": 2, "device": "cuda:1"}, 9, "cuda:9 to cuda:12, .* cuda:8: give --workers 2 or less"),
    ],
)
def test_a_group_on_one_machine_needs_a_device_for_each_rank(
    changes: dict[str, object], num_devices: int, said: str
) -> None:
    options = replace(USUAL, tensor_parallel=4, **changes)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=said):
        check_options(options, has_driver=True, has_kernels=True, count_devices=lambda: num_devices)


@pytest.mark.parametrize(
    ("changes", "num_devices"),
    [
        ({"device": "cuda"}, 4),
        ({"device": "cuda:4"}, 8),
        ({"worker_number": 1}, 11),
        ({"worker_number": 2, "device": "cuda:1"}, 13),
        ({"device": "cuda:9"}, 4),  # one that torch refuses by its own number
        ({"device": "cuda"}, None),  # AMD's driver does not tell
        ({}, 0),  # a group on CPUs
        ({"device": "cpu", "runner": "device"}, 1),
        ({"device": "cuda", "group_address": "10.0.0.7:7900"}, 1),
    ],
)
def test_groups_that_have_their_devices_pass(changes: dict[str, object], num_devices: int | None) -> None:
    options = replace(USUAL, tensor_parallel=4, **changes)  # type: ignore[arg-type]
    check_options(options, has_driver=True, has_kernels=True, count_devices=lambda: num_devices)


def test_devices_are_counted_for_groups_alone() -> None:
    """Counting wakes the driver."""

    def count() -> int:
        raise AssertionError("no group needs several devices")

    for changes in ({}, {"device": "cuda"}, {"device": "cpu", "tensor_parallel": 2}):
        options = replace(USUAL, **changes)
        check_options(options, has_driver=True, has_kernels=True, count_devices=count)


def test_what_only_torch_can_tell_is_left_to_it() -> None:
    for options in (
        replace(USUAL, kv_dtype="fp8"),
        replace(USUAL, weight_dtype="fp8"),
        replace(USUAL, weight_dtype="int4"),
        replace(USUAL, kv_dtype="int8"),
        replace(USUAL, weight_dtype="int8"),
        replace(USUAL, attention="triton"),
    ):
        check_options(options, has_driver=True, has_kernels=True, libraries=())


@pytest.mark.parametrize("name", ["flashinfer", "flash-attn"])
def test_an_attention_library_that_is_installed_can_be_had_on_a_cuda_device(name: str) -> None:
    options = replace(USUAL, attention=name)
    check_options(options, has_driver=True, has_kernels=True, libraries=(name,))
    with pytest.raises(OptionError, match="chooses kernels of a CUDA device"):
        check_options(options, has_driver=False, has_kernels=True, libraries=(name,))
