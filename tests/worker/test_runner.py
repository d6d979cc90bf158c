"""The runner with a real decoder: steps give the tokens and log-probabilities that the model has."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.sampling_params import SequenceSampling
from common.step import Step, StepResult
from kernels.native.torch_kernels import TorchKernels
from kernels.sampling.sampling import TokenLogprobs
from kernels.sampling.sampling_operations import concatenate
from tests.equality import assert_equal_greedy
from tests.worker.runners import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    NUM_SEATS,
    MakeRunner,
    SteppedRunner,
    full_logits,
    limits_for,
    poisoned_pool,
)
from tests.worker.step_client import StepClient
from tests.worker.steps import GREEDY, seat_state
from tests.worker.tiny_models import GreedyReference, random_prompts, reference_greedy, write_tiny_model
from worker_svc.cpu.host_decoder import GreedyChoice, HostDecoder
from worker_svc.cpu.runner import CpuRunner, distinct_rows
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.batch import ForwardBatch
from worker_svc.model.decoder import Decoder, load_decoder
from worker_svc.sampling import prompt_logprobs

NUM_TOKENS = 24
PROMPTS = random_prompts([1, 3, 4, 5, 9, 17, 30])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model("llama_gqa", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return load_decoder(folder, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> GreedyReference:
    return reference_greedy(folder, PROMPTS, NUM_TOKENS)


def generate(runner: SteppedRunner, client: StepClient, num_tokens: int, chunk: int) -> list[list[int]]:
    while not client.is_done(num_tokens):
        step = client.next_step(chunk)
        client.take(step, runner.run(step))
    return client.outputs(num_tokens)


def new_client(seed: int = 0) -> StepClient:
    return StepClient(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, seed=seed)


@pytest.mark.parametrize("chunk", [4, 64])
def test_greedy_tokens_are_those_of_each_prompt_alone(
    make_runner: MakeRunner, decoder: Decoder, reference: GreedyReference, chunk: int
) -> None:
    runner, _ = make_runner(decoder)
    client = new_client(seed=chunk)
    for prompt in PROMPTS:
        client.add(prompt)
    ours = generate(runner, client, NUM_TOKENS, chunk)
    assert_equal_greedy(reference.tokens, reference.margins, ours)


def test_a_snapshot_in_every_step_gives_the_same_tokens(
    make_runner: MakeRunner, decoder: Decoder, reference: GreedyReference
) -> None:
    runner, _ = make_runner(decoder)
    client = new_client()
    for prompt in PROMPTS:
        client.add(prompt)
    while not client.is_done(NUM_TOKENS):
        step = client.next_step(8, snapshot=True)
        client.take(step, runner.run(step))
    assert_equal_greedy(reference.tokens, reference.margins, client.outputs(NUM_TOKENS))


def test_logprobs_are_those_of_the_raw_logits(make_runner: MakeRunner, decoder: Decoder) -> None:
    runner, _ = make_runner(decoder)
    client = new_client()
    sampling = SequenceSampling(seed=3, temperature=0.7, top_k=20, num_logprobs=4, num_prompt_logprobs=2)
    sequence = client.add(PROMPTS[5], sampling)
    other = client.add(PROMPTS[3])
    generate(runner, client, 12, chunk=5)
    logprobs = full_logits(decoder, sequence.token_ids).log_softmax(-1)
    positions = range(len(sequence.token_ids))
    expected = [float(logprobs[i - 1, sequence.token_ids[i]]) for i in positions if i >= sequence.num_prompt_tokens]
    assert sequence.logprobs == pytest.approx(expected, abs=1e-4)
    best = logprobs[sequence.num_prompt_tokens - 1 : -1].topk(4).indices.tolist()
    assert sequence.top_token_ids == best
    assert sorted(sequence.prompt_logprobs) == list(range(1, sequence.num_prompt_tokens))
    for position, found in sequence.prompt_logprobs.items():
        assert found == pytest.approx(float(logprobs[position - 1, sequence.token_ids[position]]), abs=1e-4)
    assert other.prompt_logprobs == {}


def test_prompt_logprobs_in_slices_of_the_head_are_the_same(
    make_runner: MakeRunner, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = []

    def counting(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
        slices.append([len(part.logprobs) for part in parts])
        return concatenate(parts)

    monkeypatch.setattr(prompt_logprobs, "concatenate", counting)
    prompt = PROMPTS[6]
    sampling = replace(GREEDY, num_prompt_logprobs=0)
    found = []
    for slice_tokens in (1000, 2, 0):  # at least one at once
        runner, _ = make_runner(decoder, max_prompt_logits=slice_tokens * decoder.config.vocab_size)
        client = new_client()
        sequence = client.add(prompt, sampling)
        generate(runner, client, 1, chunk=64)
        found.append(list(sequence.prompt_logprobs.values()))
    num_rows = len(prompt) - 1
    assert len(found[0]) == num_rows
    assert slices == [[num_rows], [2] * (num_rows // 2) + [1] * (num_rows % 2), [1] * num_rows]
    assert found[1] == pytest.approx(found[0], abs=1e-5) and found[2] == pytest.approx(found[0], abs=1e-5)


def test_one_row_feeds_the_first_token_of_several_samples(make_runner: MakeRunner, decoder: Decoder) -> None:
    """Two samples share the prompt's blocks, the last of them full; alone, each gives the same tokens."""
    prompt = PROMPTS[3] + PROMPTS[2][:3]  # 8 tokens: 2 blocks
    samplings = [SequenceSampling(seed=5, sample_index=index, temperature=1.5) for index in range(2)]
    runner, _ = make_runner(decoder)
    first = seat_state(0, prompt, [10, 11], sampling=samplings[0])
    second = seat_state(1, [], [10, 11], sampling=samplings[1], position=8, num_prompt_tokens=8)
    step = Step(epoch=1, step_id=1, snapshot=True, whole=[first, second], rows=[0])
    step = replace(step, num_tokens=[8], samples=[0, 0, 0, 1])
    outputs = [[token] for token in runner.run(step).token_ids]
    for step_id, append_pairs in ((2, [0, 20, 1, 21]), (3, []), (4, [])):
        result = runner.run(Step(epoch=1, step_id=step_id, append_pairs=append_pairs, rows=[1, 0]))
        outputs[1].append(result.token_ids[0])
        outputs[0].append(result.token_ids[1])
    alone = []
    for sampling in samplings:
        client = new_client()
        client.add(prompt, sampling)
        alone += generate(make_runner(decoder)[0], client, 4, chunk=64)
    assert outputs == alone
    assert outputs[0] != outputs[1]


def test_a_row_may_draw_from_more_tokens_than_there_are_seats(make_runner: MakeRunner, decoder: Decoder) -> None:
    top_k = 3 * NUM_SEATS
    drawn: set[int] = set()
    for step_id in range(1, 9):
        samplings = [
            SequenceSampling(seed=step_id, sample_index=index, temperature=50.0, top_k=top_k) for index in range(8)
        ]
        prompt = seat_state(0, PROMPTS[3], [10, 11], sampling=samplings[0])
        others = [
            seat_state(seat, [], [10, 11], sampling=samplings[seat], position=5, num_prompt_tokens=5)
            for seat in range(1, 8)
        ]
        step = Step(epoch=1, step_id=step_id, snapshot=True, whole=[prompt, *others], rows=[0], num_tokens=[5])
        drawn.update(
            make_runner(decoder)[0].run(replace(step, samples=[*chain(*((0, seat) for seat in range(8)))])).token_ids
        )
    assert NUM_SEATS < len(drawn) <= top_k


def test_children_of_a_prompt_copy_its_last_block_before_they_write(make_runner: MakeRunner, decoder: Decoder) -> None:
    """Three samples share the prompt's full blocks; their penalties see the prompt, which only the parent was sent."""
    prompt, num_tokens = PROMPTS[4], 8  # 9 tokens: 2 full blocks and one with one token
    common = SequenceSampling(seed=5, temperature=1.5, repetition_penalty=1.2, frequency_penalty=0.4)
    samplings = [replace(common, sample_index=index) for index in range(3)]
    runner, pool = make_runner(decoder)
    parent = seat_state(0, prompt, [10, 11, 12], sampling=samplings[0])
    at_its_end = {"position": 9, "num_prompt_tokens": 9, "history": prompt}
    children = [seat_state(seat, [], [10, 11], sampling=samplings[seat], **at_its_end) for seat in (1, 2)]
    step = Step(epoch=1, step_id=1, snapshot=True, whole=[parent, *children], rows=[0], num_tokens=[9])
    outputs = [[token] for token in runner.run(replace(step, samples=[0, 0, 0, 1, 0, 2])).token_ids]
    free = iter(range(20, 40))
    for position in range(9, 9 + num_tokens - 1):
        step = Step(epoch=1, step_id=position - 7, rows=[2, 0, 1])
        if position == 9:
            first, second = next(free), next(free)
            pool.blocks[[first, second]] = float("nan")
            step = replace(step, copies=[12, first, 12, second], append_pairs=[1, first, 2, second])
        elif position % BLOCK_SIZE == 0:
            step = replace(step, append_pairs=[number for seat in range(3) for number in (seat, next(free))])
        for seat, token in zip(step.rows, runner.run(step).token_ids, strict=True):
            outputs[seat].append(token)
    for sampling, output in zip(samplings, outputs, strict=True):
        client = new_client()
        client.add(prompt, sampling)
        assert output == generate(make_runner(decoder)[0], client, num_tokens, chunk=64)[0]
    assert len({tuple(output) for output in outputs}) == 3


def test_penalties_see_the_prompt_and_the_output_however_the_seat_was_sent(
    make_runner: MakeRunner, decoder: Decoder
) -> None:
    """A frequency penalty that no logit outweighs forbids repeating an output, also after the seat was moved."""
    sampling = replace(GREEDY, repetition_penalty=100.0, frequency_penalty=2.0)
    outputs = []
    for snapshots in (False, True):
        runner, _ = make_runner(decoder)
        client = new_client()
        client.add(PROMPTS[2], sampling)
        client.add(PROMPTS[4])
        for _ in range(30):
            step = client.next_step(64, snapshot=snapshots)
            client.take(step, runner.run(step))
        outputs.append(client.outputs(30))
        assert len(set(outputs[-1][0])) == 30
        assert len(set(outputs[-1][1])) < 30  # without penalty this model repeats itself
    assert outputs[0] == outputs[1]


def test_a_row_that_is_not_finite_is_reported_and_disturbs_no_other(make_runner: MakeRunner, decoder: Decoder) -> None:
    prompts = [PROMPTS[2], PROMPTS[3]]
    states = [seat_state(seat, prompt, [2 * seat, 2 * seat + 1]) for seat, prompt in enumerate(prompts)]
    step = Step(epoch=1, step_id=1, snapshot=True, whole=states, rows=[0, 1], num_tokens=[4, 5])
    clean, _ = make_runner(decoder)
    expected = [clean.run(step), clean.run(Step(epoch=1, step_id=2, rows=[1]))]
    runner, pool = make_runner(decoder)
    runner.run(step)
    pool.blocks[0] = float("nan")
    result = runner.run(Step(epoch=1, step_id=2, append_pairs=[0, 9], rows=[0, 1]))
    assert list(result.invalid_samples) == [0]
    assert result.token_ids[1] == expected[1].token_ids[0]


def test_a_step_without_rows_only_changes_seats(make_runner: MakeRunner, decoder: Decoder) -> None:
    runner, _ = make_runner(decoder)
    state = seat_state(0, PROMPTS[1], [0])
    assert runner.run(Step(epoch=1, step_id=1, snapshot=True, whole=[state])).token_ids == ()
    result = runner.run(Step(epoch=1, step_id=2, rows=[0], num_tokens=[3]))
    assert isinstance(result, StepResult)
    assert len(result.token_ids) == 1


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
@pytest.mark.parametrize("num_logprobs", [None, 0])
def test_samples_are_answered_in_their_own_order_whatever_that_of_their_rows(
    make_runner: MakeRunner, decoder: Decoder, order: list[int], num_logprobs: int | None
) -> None:
    runner, _ = make_runner(decoder)
    sampling = replace(GREEDY, num_logprobs=num_logprobs)
    whole = [seat_state(i, PROMPTS[i + 1], range(8 * i, 8 * i + 3), sampling=sampling) for i in range(3)]
    samples = [number for row in order for number in (row, row)]
    num_tokens = [len(state.token_ids) for state in whole]
    step = Step(epoch=1, step_id=1, snapshot=True, whole=whole, rows=[0, 1, 2], num_tokens=num_tokens, samples=samples)
    expected = [int(full_logits(decoder, list(PROMPTS[row + 1]))[-1].argmax()) for row in order]
    assert len(set(expected)) == 3
    assert list(runner.run(step).token_ids) == expected


def test_a_row_that_several_samples_share_is_computed_once() -> None:
    for sample_rows in ([0, 2, 5], [0, 0, 3], [4, 4, 4], [3, 1, 3], []):
        rows, which = distinct_rows(np.array(sample_rows, np.int32))
        assert rows.tolist() == sorted(set(sample_rows))
        assert rows[which].tolist() == sample_rows


class NotingDecoder(HostDecoder):
    """A decoder that notes whether its passes choose tokens themselves."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder, TorchKernels())
        self.passes: list[str] = []

    def greedy(self, batch: ForwardBatch, kv_pool: KVPool) -> GreedyChoice:
        self.passes.append("greedy")
        return super().greedy(batch, kv_pool)

    def hidden(self, batch: ForwardBatch, kv_pool: KVPool) -> torch.Tensor:
        self.passes.append("hidden")
        return super().hidden(batch, kv_pool)


def test_a_pass_chooses_tokens_itself_if_all_its_rows_are_plain_greedy_samples(decoder: Decoder) -> None:
    model = NotingDecoder(decoder)
    cpu_runner = CpuRunner(model, poisoned_pool(decoder), limits_for(decoder))

    def announce() -> None:
        """Let others have the interpreter's lock."""

    cpu_runner.before_pass = announce
    assert cpu_runner.model is model and model.before_pass is cpu_runner.before_pass is announce
    runner = SteppedRunner(cpu_runner)
    sampled = replace(GREEDY, temperature=1.0)
    seats = [seat_state(0, [5, 6, 7], [0, 3]), seat_state(1, [5, 6], [1]), seat_state(2, [8], [2], sampling=sampled)]
    steps: list[dict[str, Any]] = [
        {"rows": [0], "num_tokens": [2], "samples": []},  # no sample
        {"rows": [0]},  # one
        {"rows": [0, 1], "num_tokens": [1, 2]},
        {"rows": [0, 1, 2]},
        {"rows": [0, 1], "samples": [0, 0], "candidates": [1, 2]},
        {"rows": [0]},
    ]
    passes = []
    for step_id, fields in enumerate(steps):
        whole = seats if step_id == 0 else []
        runner.run(Step(epoch=1, step_id=step_id, snapshot=step_id == 0, whole=whole, **fields))
        passes.append(model.passes.pop(0))
        model.passes.clear()
    assert passes == ["hidden", "greedy", "greedy", "hidden", "hidden", "greedy"]
