"""Choice of the runner, its device and its KV, and the refusals of impossible ones."""

import re
from dataclasses import replace

import pytest
import torch

from worker_svc.option_check import DeviceError
from worker_svc.runner_choice import (
    Machine,
    RequestedRunner,
    RunnerChoice,
    WeightDtype,
    choose_runner,
    detect_machine,
)

NOTHING_ASKED = RequestedRunner(device="auto", runner="auto", kv_dtype="auto")
NO_GPU = Machine()
HOPPERS = Machine(cuda_capabilities=((9, 0), (9, 0)), current_cuda_device=1, has_triton=True)
TURING = Machine(cuda_capabilities=((7, 5),), has_triton=True)
CPU, CUDA_1 = torch.device("cpu"), torch.device("cuda:1")


def test_without_a_gpu_it_is_the_plain_runner_in_a_dtype_that_is_left_to_the_checkpoint() -> None:
    choice = choose_runner(NOTHING_ASKED, NO_GPU)
    assert choice == RunnerChoice(kind="cpu", device=CPU, kv_dtype=None)
    assert not choice.has_kernels


def test_with_a_gpu_its_runner_computes_with_kernels_in_the_checkpoints_dtype() -> None:
    choice = choose_runner(NOTHING_ASKED, HOPPERS)
    assert choice == RunnerChoice(kind="device", device=CUDA_1, kv_dtype=None)
    assert choice.has_kernels


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (TURING, "cuda:0 has compute capability 7.5, and the kernels need 8.0"),
        (Machine(why_no_cuda="the driver may be too old"), "the driver may be too old"),
        (NO_GPU, None),
    ],
)
def test_without_a_gpu_that_can_compute_a_cpu_does_and_says_why(machine: Machine, why: str | None) -> None:
    choice = choose_runner(NOTHING_ASKED, machine)
    assert (choice.kind, choice.device, choice.why_not_cuda) == ("cpu", CPU, why)
    assert choose_runner(replace(NOTHING_ASKED, device="cpu"), machine).why_not_cuda is None


def test_the_accelerators_runner_can_be_had_on_a_cpu() -> None:
    on_cpu = choose_runner(replace(NOTHING_ASKED, device="cpu", runner="device"), HOPPERS)
    assert (on_cpu.kind, on_cpu.device, on_cpu.has_kernels) == ("device", CPU, False)


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_keys_and_values_can_be_fp8_with_the_accelerators_runner(device: str) -> None:
    requested = replace(NOTHING_ASKED, device=device, runner="device", kv_dtype="fp8")
    choice = choose_runner(requested, HOPPERS)
    assert choice.kv_dtype == torch.float8_e4m3fn


def test_keys_and_values_can_be_int8_with_the_cpus_own_runner() -> None:
    choice = choose_runner(replace(NOTHING_ASKED, device="cpu", kv_dtype="int8"), HOPPERS)
    assert (choice.kind, choice.kv_dtype) == ("cpu", torch.int8)


@pytest.mark.parametrize("weight_dtype", ["fp8", "int4"])
def test_weights_can_have_8_or_4_bits_with_the_accelerators_runner(weight_dtype: WeightDtype) -> None:
    for requested in (NOTHING_ASKED, replace(NOTHING_ASKED, device="cpu", runner="device")):
        assert choose_runner(replace(requested, weight_dtype=weight_dtype), HOPPERS).kind == "device"


@pytest.mark.parametrize(
    ("requested", "machine", "message"),
    [
        (
            replace(NOTHING_ASKED, device="cuda"),
            Machine(why_no_cuda="the driver has 1, and torch is a build without CUDA: install another"),
            "torch sees no CUDA device (the driver has 1, and torch is a build without CUDA: install another): use",
        ),
        (
            replace(NOTHING_ASKED, device="cuda"),
            TURING,
            "--device cuda: cuda:0 has compute capability 7.5, and the kernels need 8.0: use --device cpu",
        ),
        (replace(NOTHING_ASKED, device="cuda"), NO_GPU, "torch sees no CUDA device: use --device cpu"),
        (replace(NOTHING_ASKED, device="cuda:2"), HOPPERS, "the last CUDA device is cuda:1"),
        (
            replace(NOTHING_ASKED, device="cuda:1", num_ranks=2),
            HOPPERS,
            "takes a CUDA device for each rank, cuda:1 to cuda:2, and the last one is cuda:1: leave it out",
        ),
        (NOTHING_ASKED, replace(HOPPERS, has_triton=False), "run pip install '.[gpu]' in a clone of Quire, or"),
        (replace(NOTHING_ASKED, kv_dtype="fp8"), NO_GPU, "leave it out, or give --runner device"),
        (
            replace(NOTHING_ASKED, kv_dtype="fp8", runner="cpu", device="cpu"),
            HOPPERS,
            "leave it out, or give --runner device",
        ),
        (replace(NOTHING_ASKED, runner="cpu"), HOPPERS, "--device is cuda:1: leave --runner out, or give --device cpu"),
        (
            replace(NOTHING_ASKED, kv_dtype="fp8"),
            Machine(cuda_capabilities=((8, 0),), has_triton=True),
            "needs compute capability 8.9, and cuda:0 has 8.0: give --kv-dtype auto",
        ),
        (
            replace(NOTHING_ASKED, weight_dtype="fp8"),
            Machine(cuda_capabilities=((8, 0),), has_triton=True),
            "--weight-dtype fp8 needs compute capability 8.9, and cuda:0 has 8.0: give --weight-dtype auto",
        ),
        (
            replace(NOTHING_ASKED, weight_dtype="int4"),
            NO_GPU,
            "--weight-dtype int4 needs the runner of an accelerator: leave it out, or give --runner device",
        ),
        (
            replace(NOTHING_ASKED, attention="flashinfer"),
            NO_GPU,
            "--attention flashinfer chooses kernels of a CUDA device, and steps are computed on cpu: leave --attention",
        ),
        (replace(NOTHING_ASKED, attention="triton", device="cpu"), HOPPERS, "are computed on cpu: leave --attention"),
        (replace(NOTHING_ASKED, weight_dtype="int8"), HOPPERS, "--weight-dtype int8 needs the CPU's runner"),
        (replace(NOTHING_ASKED, kv_dtype="int8"), HOPPERS, "leave it out, or give --device cpu and --runner cpu"),
        (
            replace(NOTHING_ASKED, kv_dtype="int8", runner="device"),
            NO_GPU,
            "leave it out, or give --device cpu and --runner cpu",
        ),
    ],
)
def test_what_the_machine_lacks_is_said_with_what_to_do(
    requested: RequestedRunner, machine: Machine, message: str
) -> None:
    with pytest.raises(DeviceError, match=re.escape(message)):
        choose_runner(requested, machine)


EIGHT_HOPPERS = Machine(cuda_capabilities=((9, 0),) * 8, has_triton=True)


@pytest.mark.parametrize(
    ("device", "num_ranks", "devices"),
    [("auto", 1, [0, 1, 2, 3]), ("cuda:5", 1, [5, 6, 7, 5]), ("cuda:7", 1, [7, 7, 7, 7]), ("cuda", 2, [0, 2, 4, 6])],
)
def test_workers_of_a_machine_take_one_device_after_the_other(device: str, num_ranks: int, devices: list[int]) -> None:
    for number, index in enumerate(devices):
        requested = replace(NOTHING_ASKED, device=device, num_ranks=num_ranks, worker_number=number)
        assert choose_runner(requested, EIGHT_HOPPERS).device == torch.device(f"cuda:{index}")


def test_groups_of_ranks_do_not_share_devices() -> None:
    fifth = replace(NOTHING_ASKED, num_ranks=2, worker_number=4)
    with pytest.raises(DeviceError, match="cuda:8 to cuda:9, and the last one is cuda:7: give --workers 4 or less"):
        choose_runner(fifth, EIGHT_HOPPERS)


def test_workers_on_cpus_have_no_devices_to_take() -> None:
    for number in range(3):
        assert choose_runner(replace(NOTHING_ASKED, worker_number=number), NO_GPU).device == CPU


def test_the_machine_at_hand_can_be_looked_at() -> None:
    machine = detect_machine()
    assert bool(machine.cuda_capabilities) == torch.cuda.is_available()
