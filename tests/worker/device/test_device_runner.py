"""Runner of the accelerator: steps launched before earlier ones are answered, and prefixes read together.

That it gives what the CPU's runner gives is shown by the tests of runners, which run both.
"""

from dataclasses import replace

import numpy as np
import pytest
from torch import Tensor

from common.sampling_params import SequenceSampling
from common.step import Step
from kernels.attention.cascade_groups import SharingCost
from kernels.attention.cascade_reference import CascadePlan
from kernels.attention.shape import Attended, ScoreRule
from tests.worker.device.recorded_graphs import RecordedGraphs
from tests.worker.device.sample_steps import comparable, decode_steps
from tests.worker.runners import NUM_SEATS, limits_for, make_cpu_runner, make_device_runner, poisoned_pool, run_ahead
from tests.worker.steps import seat_state
from tests.worker.tiny_models import random_prompts
from worker_svc.gpu.graphs import graph_sizes
from worker_svc.gpu.runner import DeviceRunner
from worker_svc.gpu.torch_operations import OPERATIONS
from worker_svc.model.decoder import Decoder
from worker_svc.steps.step_limits import InvalidStepError

FREE = SharingCost(per_step=0, per_group=0, per_row=0)  # so that anything shared is worth it


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("captured", [False, True], ids=["launches", "graphs"])
def test_steps_launched_before_earlier_ones_are_answered_give_the_same(
    decoder: Decoder, depth: int, captured: bool
) -> None:
    plain, _ = make_cpu_runner(decoder)
    pool, limits = poisoned_pool(decoder), limits_for(decoder)
    graphs = RecordedGraphs()
    operations = graphs.operations(OPERATIONS)
    runner = DeviceRunner(decoder, pool, limits, operations, graph_sizes(limits.num_seats), graphs=graphs)
    if captured:
        runner.capture_graphs()
    steps = decode_steps(8)
    results = run_ahead(runner, steps, depth)
    expected = [plain.run(step) for step in steps]
    assert [comparable(result) for result in results] == [comparable(result) for result in expected]
    for ours, theirs in zip(results, expected, strict=True):
        for index, row in theirs.logprobs.items():
            assert list(ours.logprobs[index].logprobs) == pytest.approx(list(row.logprobs), abs=1e-4)


def test_rows_that_begin_with_the_same_blocks_attend_to_them_together(decoder: Decoder) -> None:
    """Rows share only then: a batch with one row more or less takes the plain path if nothing is shared."""
    seen: list[int] = []

    def cascade(
        query: Tensor, keys: Tensor, values: Tensor, plan: CascadePlan, rule: ScoreRule, out: Tensor | None = None
    ) -> Attended:
        seen.append(int((plan.groups.group_of_row >= 0).sum()))
        return OPERATIONS.cascade_attention(query, keys, values, plan, rule, out)

    plain, _ = make_device_runner(decoder)
    pool, limits = poisoned_pool(decoder), limits_for(decoder)
    operations = replace(OPERATIONS, cascade_attention=cascade)
    sharing = DeviceRunner(decoder, pool, limits, operations, graph_sizes(NUM_SEATS), cost=FREE)
    steps = decode_steps(8)
    results = [sharing.launch(step).wait() for step in steps]
    assert [comparable(result) for result in results] == [comparable(plain.run(step)) for step in steps]
    num_layers = decoder.config.num_layers
    assert seen == [3] * num_layers * (len(steps) - 1)  # the prompt's step has none
    alone = Step(epoch=1, step_id=len(steps) + 1, rows=[0, 3])
    assert comparable(sharing.launch(alone).wait()) == comparable(plain.run(alone))
    assert len(seen) == num_layers * (len(steps) - 1)
    prompt = seat_state(5, random_prompts([4], seed=8)[0], [60, 61])
    mixed = Step(epoch=1, step_id=len(steps) + 2, whole=[prompt], rows=[5, 0, 1, 2], num_tokens=[4, 1, 1, 1])
    assert comparable(sharing.launch(mixed).wait()) == comparable(plain.run(mixed))
    assert seen[num_layers * (len(steps) - 1) :] == [3] * num_layers  # beside a prompt, too


def test_a_step_that_cannot_be_changes_nothing(decoder: Decoder) -> None:
    runner, _ = make_device_runner(decoder)
    steps = decode_steps(3)
    expected, _ = make_device_runner(decoder)
    for step in steps:
        with pytest.raises(InvalidStepError):
            runner.run(replace(step, rows=[*step.rows, 7], num_tokens=()))
        assert comparable(runner.run(step)) == comparable(expected.run(step))


def test_all_seats_can_be_filled_in_one_step_each_with_ids_of_its_own(decoder: Decoder) -> None:
    """Prompts of many tokens, sampled by allowed ids, of which there are many."""
    allowed = tuple(range(0, decoder.config.vocab_size, 2))
    sampling = SequenceSampling(seed=1, temperature=0.8, allowed_token_ids=allowed, top_p=0.9)
    prompts = random_prompts([20] * 12, seed=5)
    states = [
        seat_state(seat, prompt, list(range(5 * seat, 5 * seat + 5)), sampling=replace(sampling, sample_index=seat))
        for seat, prompt in enumerate(prompts)
    ]
    step = Step(epoch=1, step_id=1, snapshot=True, whole=states, rows=list(range(12)), num_tokens=[20] * 12)
    results = [runner.run(step) for runner in (make_cpu_runner(decoder)[0], make_device_runner(decoder)[0])]
    assert comparable(results[0]) == comparable(results[1])
    assert not np.isin(results[1].token_ids, allowed, invert=True).any()
