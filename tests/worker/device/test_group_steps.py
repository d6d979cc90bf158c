"""Groups of processes with the accelerator's runner give what one process gives, also with steps launched ahead."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from common.step import Step, StepResult
from quire.worker_settings import WorkerSettings
from tests.worker.device.sample_steps import comparable, decode_steps
from tests.worker.forked_ranks import fork_rank
from tests.worker.quantised_models import write_wide_model
from tests.worker.runners import run_ahead
from tests.worker.steps import GREEDY, seat_state
from tests.worker.tiny_models import random_prompts, write_tiny_model
from worker_svc.loaded_model import LoadedModel
from worker_svc.ranks.lead_runner import LeadRunner
from worker_svc.start.loading import load_model
from worker_svc.steps.step_limits import InvalidStepError
from worker_svc.steps.step_runner import PassCountingRunner, StepRunner

SIZES: dict[str, Any] = {
    "device": "cpu",
    "runner": "device",
    "dtype": "float32",
    "threads": 1,
    "num_blocks": 96,
    "num_host_blocks": 8,
    "block_size": 4,
    "max_num_seqs": 12,
    "max_batched_tokens": 64,
}


@contextmanager
def loaded(folder: Path, num_ranks: int, **options: Any) -> Iterator[LoadedModel]:
    """A worker of so many processes, which ends behind the block."""
    settings = WorkerSettings(model=str(folder), **{**SIZES, **options}, tensor_parallel=num_ranks)
    model = load_model(settings, start_rank=fork_rank)
    try:
        yield model
    finally:
        model.close()


def results_of(folder: Path, num_ranks: int, steps: Sequence[Step], depth: int, **options: Any) -> list[StepResult]:
    with loaded(folder, num_ranks, **options) as model:
        return run_ahead(model.runner, steps, depth)


def steps_with_swaps() -> list[Step]:
    """Three samples that share blocks, then a prompt beside them, and blocks that go to the host and come back."""
    steps = decode_steps(10)
    prompt = seat_state(5, random_prompts([6], seed=8)[0], [60, 61], sampling=GREEDY)
    mixed = Step(epoch=1, step_id=len(steps) + 1, whole=[prompt], rows=[5, 0, 1], num_tokens=[6, 1, 1])
    mixed.swap_out = [50, 0, 51, 1]
    mixed.candidates, mixed.samples = [2, 4], [0, 5, 1, 0]
    back = Step(epoch=1, step_id=mixed.step_id + 1, rows=[5, 3])
    back.swap_in = [0, 50, 1, 51]
    return [*steps, mixed, back, Step(epoch=1, step_id=back.step_id + 1, rows=[3, 5])]


@pytest.mark.parametrize("model", ["llama_gqa", "gpt2"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_steps_launched_ahead_give_what_one_process_gives(model: str, num_ranks: int, tmp_path: Path) -> None:
    folder, steps = write_tiny_model(model, tmp_path / "model"), steps_with_swaps()
    expected = results_of(folder, 1, steps, 1)
    with loaded(folder, num_ranks) as group:
        for depth in (1, 2, 3):
            results = run_ahead(group.runner, steps, depth)
            assert [comparable(each) for each in results] == [comparable(each) for each in expected]
            for ours, theirs in zip(results, expected, strict=True):
                ranked = [list(each.token_ids) for each in theirs.candidates]
                assert [list(each.token_ids) for each in ours.candidates] == ranked
        assert isinstance(group.runner, PassCountingRunner)
        assert group.runner.kernel_passes["no_graphs"] >= 3 * len(steps)


def test_a_step_that_is_refused_changes_nothing_on_any_rank(tmp_path: Path) -> None:
    folder, steps = write_tiny_model("llama_gqa", tmp_path / "model"), decode_steps(4)
    expected = results_of(folder, 1, steps, 1)
    with loaded(folder, 2) as group:
        results = []
        for step in steps:
            with pytest.raises(InvalidStepError):
                group.runner.launch(Step(epoch=1, step_id=step.step_id, rows=[*step.rows, 11], num_tokens=()))
            results += run_ahead(group.runner, [step])
        assert isinstance(group.runner, LeadRunner)
        assert group.runner.unended.waited_s() == 0
    assert [comparable(each) for each in results] == [comparable(each) for each in expected]


def test_no_step_counts_as_running_once_all_have_ended(tmp_path: Path) -> None:
    """Else a group without work would end for want of progress."""
    folder = write_tiny_model("llama_mha", tmp_path / "model")
    with loaded(folder, 2) as group:
        runner: StepRunner = group.runner
        assert isinstance(runner, LeadRunner)
        pending = [runner.launch(step) for step in decode_steps(2)]
        assert runner.unended.waited_s() > 0
        for each in pending:
            assert not isinstance(each, StepResult)
            each.wait()
        assert runner.unended.waited_s() == 0


def test_ranks_hold_parts_of_the_pool_and_of_the_weights(tmp_path: Path) -> None:
    folder = write_tiny_model("llama_mha", tmp_path / "model")
    sizes: dict[str, Any] = {"num_blocks": None, "kv_memory_bytes": 1 << 20, "num_host_blocks": 4}
    with loaded(folder, 1, **sizes) as whole, loaded(folder, 4, **sizes) as group:
        ours, theirs = group.description, whole.description
        assert ours.limits.num_blocks == theirs.limits.num_blocks
        assert (ours.bytes_per_block, ours.num_ranks) == (theirs.bytes_per_block, 4)
        assert ours.memory is not None and theirs.memory is not None
        assert ours.memory.kv_pool_bytes == theirs.memory.kv_pool_bytes
        assert group.travel is None


@pytest.mark.parametrize("options", [{"weight_dtype": "int4"}, {"weight_dtype": "fp8"}, {"kv_dtype": "fp8"}], ids=str)
def test_numbers_of_few_bits_are_divided(options: dict[str, str], tmp_path: Path) -> None:
    """Ranks differ from one process by no more than that does from the model's own dtype.

    They round apart: e4m3 has scales of its own for a rank's inputs, and a part that does not fit stays as it is.
    """
    torch.set_num_threads(1)
    folder, steps = write_wide_model("llama", tmp_path), decode_steps(3)
    plain, few = (results_of(folder, 1, steps, 1, **each) for each in ({}, options))
    ranks = results_of(folder, 2, steps, 1, **options)
    lost = (logprobs_of(few) - logprobs_of(plain)).abs().max().item()
    assert lost > 1e-4, "the form makes no difference"
    assert (logprobs_of(ranks) - logprobs_of(few)).abs().max().item() <= 2 * lost


def logprobs_of(results: Sequence[StepResult]) -> torch.Tensor:
    """Log-probabilities of the first step's most likely tokens: of later steps the tokens may be others."""
    return torch.tensor([list(row.top_logprobs) for row in results[0].logprobs.values()])
