"""Start of a runner, the KV pool's share of a device's memory, and memory that is short."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from common.step import Step, StepResult
from tests.worker.steps import LIMITS
from worker_svc.description import PhaseClock
from worker_svc.gpu.device_loss import device_lost_if_it_says_so
from worker_svc.gpu.memory_profile import MemoryProfile, graph_tokens
from worker_svc.gpu.start import refuse_large_weights, start_runner
from worker_svc.memory.kv_pool import BlockShape, KVPool
from worker_svc.memory.pool_plan import PoolSizeError
from worker_svc.steps.step_limits import StepLimits
from worker_svc.steps.step_runner import DeviceLostError

GIB = 1 << 30
PROFILE = MemoryProfile(
    total=80 * GIB,
    free=60 * GIB,
    weights=15 * GIB,
    trial_pool=1 * GIB,
    buffers=2 * GIB,
    activations=3 * GIB,
    graphs=4 * GIB,
    max_mixed_tokens=8192,
)
OUT_OF_MEMORY = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
# As the runtime says it of a graph, Triton of a kernel that it loads, and cuBLAS of its own memory.
OTHERS_OUT_OF_MEMORY = (
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)


class FakeRunner:
    """Notes what it is told; out of memory at what the test says."""

    def __init__(self, runs_out_at: str = "", error: RuntimeError = OUT_OF_MEMORY) -> None:
        self.told: list[str] = []
        self.max_mixed_tokens: int | None = None
        self._runs_out_at = runs_out_at
        self._error = error

    def launch(self, step: Step) -> StepResult:
        self._note("launch")
        return StepResult(epoch=step.epoch, step_id=step.step_id)

    def warm_up(self) -> None:
        self._note("warm_up")

    def capture_graphs(self, max_mixed_tokens: int | None = None) -> None:
        self.max_mixed_tokens = max_mixed_tokens
        self._note("capture")

    def release_graphs(self) -> None:
        self._note("release")

    def _note(self, what: str) -> None:
        if what == self._runs_out_at:
            raise self._error
        self.told.append(what)


def start(runner: FakeRunner, *, graphs: bool, max_mixed_tokens: int | None = None) -> Sequence[str]:
    """Returns the phases."""
    shape = BlockShape(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype=torch.float32)
    pool = KVPool(shape, LIMITS.num_blocks, torch.device("cpu"))
    clock = PhaseClock()

    def make(made_for: KVPool, limits: StepLimits) -> FakeRunner:
        assert (made_for, limits) == (pool, LIMITS)
        return runner

    started = start_runner(make, pool, LIMITS, graphs=graphs, clock=clock, max_mixed_tokens=max_mixed_tokens)
    assert started is runner
    return [each.phase for each in clock.phases]


def test_the_pool_gets_what_everything_else_leaves() -> None:
    # 60 GiB are free beside the trial; its pool comes back, and steps and graphs take 7.
    assert PROFILE.available == 54 * GIB


def test_all_of_the_memory_is_accounted_for() -> None:
    # 80 - 60 free - 15 weights - 1 trial - 2 buffers
    assert PROFILE.others == 2 * GIB
    assert PROFILE.parts["others"] == 2 * GIB
    assert sum(PROFILE.parts.values()) == PROFILE.total


def test_no_memory_left_is_none_and_not_less() -> None:
    scarce = MemoryProfile(
        total=100, free=10, weights=80, trial_pool=5, buffers=5, activations=20, graphs=0, max_mixed_tokens=9
    )
    assert scarce.available == 0


@pytest.mark.parametrize(
    ("activations", "tokens"),
    [
        (6 * GIB, 8192),  # 55 GiB are left, an eighth of which holds the largest step
        (7 * GIB, 7899),  # 54 GiB: 8192 * 6.75 / 7
        (21 * GIB, 1950),  # 40 GiB: 8192 * 5 / 21
        (70 * GIB, 0),  # nothing is left
    ],
)
def test_graphs_with_prompts_keep_within_an_eighth_of_the_memory(activations: int, tokens: int) -> None:
    profile = replace(PROFILE, activations=activations, graphs=0)
    assert profile.available == max(0, 61 * GIB - activations)
    assert graph_tokens(profile, 8192) == tokens


def test_the_runner_captures_what_the_trial_measured() -> None:
    runner = FakeRunner()
    start(runner, graphs=True, max_mixed_tokens=4096)
    assert runner.max_mixed_tokens == 4096


def test_graphs_are_captured_before_the_first_steps_if_they_are_wanted() -> None:
    runner = FakeRunner()
    assert start(runner, graphs=True) == ["graphs", "warm_up"]
    assert runner.told == ["capture", "launch", "launch", "launch"]
    runner = FakeRunner()
    assert start(runner, graphs=False) == ["warm_up"]
    assert runner.told == ["launch", "launch", "launch"]


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, *OTHERS_OUT_OF_MEMORY], ids=str)
@pytest.mark.parametrize("what", ["capture", "launch"])
def test_a_device_that_is_too_small_beside_the_pool_is_said_with_what_to_give(what: str, error: RuntimeError) -> None:
    with pytest.raises(PoolSizeError, match=r"beside a pool of 32 blocks, .* give fewer --max-batched-tokens"):
        start(FakeRunner(runs_out_at=what, error=error), graphs=True)


def test_another_fault_of_the_start_is_not_said_to_be_memory() -> None:
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        start(FakeRunner("capture", torch.AcceleratorError("CUDA error: an illegal memory access")), graphs=True)


def test_weights_that_a_device_does_not_hold_are_refused_with_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, 24 * GIB))
    said = "with 20.00 GiB free on cuda:0 the device's memory does not hold the model's weights: give --weight-dtype"
    with pytest.raises(PoolSizeError, match=said), refuse_large_weights(torch.device("cuda:0")):
        raise OUT_OF_MEMORY


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, *OTHERS_OUT_OF_MEMORY], ids=str)
def test_a_step_for_which_memory_is_short_does_not_lose_the_device(error: RuntimeError) -> None:
    with pytest.raises(type(error)), device_lost_if_it_says_so(torch.device("cpu")):
        raise error


def test_a_step_that_the_device_breaks_off_loses_it() -> None:
    with pytest.raises(DeviceLostError, match="illegal"), device_lost_if_it_says_so(torch.device("cpu")):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
