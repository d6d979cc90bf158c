"""Tensor-parallel groups of two and four processes compute what `transformers` does, for every family.

Each step goes through the real start of a group and its runner: greedy and sampled sequences, log-probabilities of a
prompt, a sequence that is computed again, and a beam search whose blocks are swapped out and in.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.sampling_params import SequenceSampling
from quire.worker_settings import WorkerSettings
from scheduler_svc.core.beam_search import BeamSearchParams
from tests.e2e.sampled_reference import expected_sample
from tests.equality import assert_equal_greedy
from tests.scheduler.beam_reference import BeamReference, compare_beams, reference_beams
from tests.worker.beam_driver import BeamDriver
from tests.worker.forked_ranks import fork_rank, fork_rank_late
from tests.worker.step_client import Sent, StepClient
from tests.worker.steps import GREEDY
from tests.worker.tiny_models import (
    TINY_MODELS,
    GreedyReference,
    random_prompts,
    reference_greedy,
    write_tiny_model,
)
from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.loaded_model import LoadedModel
from worker_svc.start.loading import load_model
from worker_svc.steps.step_runner import result_of

NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE, NUM_SEATS = 128, 32, 4, 12
NUM_TOKENS = 18
PROMPTS = random_prompts([1, 6, 26])
BEAM_PROMPT = random_prompts([9], seed=3)[0]
BEAMS = BeamSearchParams(beam_width=3, num_return=3, max_tokens=12, eos_token_ids=frozenset())
SAMPLED = SequenceSampling(seed=4, temperature=1.2, top_p=0.9)


@dataclass(frozen=True, slots=True)
class Reference:
    """One checkpoint, and what `transformers` makes of it."""

    folder: Path
    model: Any
    greedy: GreedyReference
    beams: BeamReference
    prompt_logprobs: list[float]  # of the longest prompt's tokens but the first


@pytest.fixture(scope="module", params=TINY_MODELS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    torch.set_num_threads(1)
    folder = write_tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([PROMPTS[-1]])
    with torch.inference_mode():
        logprobs = model(prompt, use_cache=False).logits[0, :-1].log_softmax(-1)
    told = logprobs.gather(1, prompt[0, 1:, None])[:, 0].tolist()
    return Reference(
        folder, model, reference_greedy(folder, PROMPTS, NUM_TOKENS), reference_beams(model, BEAM_PROMPT, BEAMS), told
    )


@contextmanager
def group(
    folder: Path, num_ranks: int, start_rank: Callable[[socket.socket], None] = fork_rank, **options: Any
) -> Iterator[LoadedModel]:
    """A loaded group, which ends behind the block."""
    settings: dict[str, Any] = {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "num_blocks": NUM_BLOCKS,
        "num_host_blocks": NUM_HOST_BLOCKS,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": NUM_SEATS,
        "max_batched_tokens": 64,
        **options,
    }
    loaded = load_model(WorkerSettings(**settings, tensor_parallel=num_ranks), start_rank=start_rank)
    try:
        yield loaded
    finally:
        loaded.close()


@pytest.mark.long
@pytest.mark.parametrize(("num_ranks", "runner"), [(2, "cpu"), (4, "cpu"), (2, "device")])
def test_a_group_computes_what_one_process_does(reference: Reference, num_ranks: int, runner: str) -> None:
    with group(reference.folder, num_ranks, runner=runner) as loaded:
        check_group(loaded, reference)


@pytest.mark.parametrize("reference", ["gpt2", "llama_mqa"], indirect=True)
def test_so_do_four_ranks_with_the_accelerators_runner(reference: Reference) -> None:
    with group(reference.folder, 4, runner="device") as loaded:
        check_group(loaded, reference)


@pytest.mark.parametrize("runner", ["cpu", "device"])
@pytest.mark.parametrize("reference", ["llama_gqa"], indirect=True)
def test_ranks_that_load_for_longer_than_their_time_limit_are_waited_for(reference: Reference, runner: str) -> None:
    """Regression: without shared memory, rank 0 waited for their connections before they had loaded."""
    options = {"kernels": "torch", "rank_timeout_s": 2.0, "runner": runner}
    with group(reference.folder, 2, start_rank=fork_rank_late(3.0), **options) as loaded:
        check_group(loaded, reference)


@pytest.mark.parametrize("runner", ["cpu", "device"])
@pytest.mark.parametrize("reference", ["opt", "llama_gqa"], indirect=True)
def test_ranks_without_native_kernels_reduce_by_gloo(reference: Reference, runner: str) -> None:
    with group(reference.folder, 2, kernels="torch", runner=runner) as loaded:
        check_group(loaded, reference)


@pytest.mark.parametrize("runner", ["cpu", "device"])
def test_a_rank_whose_part_cannot_be_loaded_says_why(runner: str, tmp_path: Path) -> None:
    """Only the last rank reads the damaged rows."""
    folder = write_tiny_model("llama_gqa", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][-1, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refusal = pytest.raises(CheckpointError, match=r"^rank 1 of the group: tensor 'lm_head.weight' in .* has NaN")
    with refusal, group(folder, 2, runner=runner):
        raise AssertionError("a damaged model was loaded")


def test_a_group_divides_what_one_process_would_take(tmp_path: Path) -> None:
    folder = write_tiny_model("llama_mha", tmp_path / "model")
    sizes: dict[str, Any] = {"num_blocks": None, "kv_memory_bytes": 1 << 20, "num_host_blocks": 4}
    whole = load_model(WorkerSettings(model=str(folder), device="cpu", dtype="float32", block_size=4, **sizes))
    with group(folder, 4, **sizes) as loaded:
        assert loaded.description.limits.num_blocks == whole.description.limits.num_blocks
        assert loaded.description.bytes_per_block == whole.description.bytes_per_block
        ours, theirs = loaded.description.memory, whole.description.memory
        assert ours is not None and theirs is not None
        assert (ours.kv_pool_bytes, ours.host_pool_bytes) == (theirs.kv_pool_bytes, theirs.host_pool_bytes)
        assert loaded.description.num_ranks == 4


@pytest.mark.parametrize("options", [{"kv_dtype": "int8"}, {"weight_dtype": "int8"}], ids=["blocks", "weights"])
def test_int8_is_rounded_by_each_rank_for_its_part(tmp_path: Path, options: dict[str, Any]) -> None:
    """Rounded otherwise than in one process, so tokens may differ; log-probabilities stay near."""
    folder = write_tiny_model("llama_mha", tmp_path / "model")
    told = []
    for num_ranks in (1, 2):
        with group(folder, num_ranks, **options) as loaded:
            client = StepClient(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
            sequence = client.add(PROMPTS[-1], replace(GREEDY, num_logprobs=0, num_prompt_logprobs=0))
            step = client.next_step(chunk=64)
            client.take(step, result_of(loaded.runner.launch(step)))
            told.append([sequence.prompt_logprobs[position] for position in range(1, len(PROMPTS[-1]))])
    assert told[1] == pytest.approx(told[0], abs=1.0)


def check_group(loaded: LoadedModel, reference: Reference) -> None:
    """Run all kinds of sequences beside each other, and compare each with the reference."""
    half = NUM_BLOCKS // 2
    client = StepClient(num_blocks=half, block_size=BLOCK_SIZE)
    greedy = [client.add(prompt) for prompt in PROMPTS[:-1]]
    greedy.append(client.add(PROMPTS[-1], replace(GREEDY, num_logprobs=0, num_prompt_logprobs=0)))
    sampled = client.add(PROMPTS[1], SAMPLED)
    places = [range(half, half + half // 2), range(half + half // 2, NUM_BLOCKS)]
    driver = BeamDriver(BEAM_PROMPT, BEAMS, GREEDY, blocks=places[0], block_size=BLOCK_SIZE, first_seat=4)
    num_steps = num_swaps = 0
    while not client.is_done(NUM_TOKENS) or driver.beams:
        num_steps += 1
        if num_steps == 8:  # preempted to be computed again, from its own tokens
            recompute(greedy[1])
        step = client.next_step(chunk=5)
        if driver.beams and num_steps % 5 == 0:  # preempted to the host; it comes back elsewhere in the next step
            num_swaps += 1
            moved = driver.move(places[num_swaps % 2])
            step.swap_out = [number for host, block in enumerate(moved) for number in (block, host)]
            client.take(step, result_of(loaded.runner.launch(step)))
            step = client.next_step(chunk=5)
            step.swap_in = [number for host, block in enumerate(moved.values()) for number in (host, block)]
        both = replace(step, whole=list(step.whole), copies=list(step.copies))
        driver.add_rows(both, chunk=4)
        result = result_of(loaded.runner.launch(both))
        client.take(step, result)
        driver.take(result.candidates)
    assert num_swaps >= 2
    assert_equal_greedy(
        reference.greedy.tokens, reference.greedy.margins, [each.output[:NUM_TOKENS] for each in greedy]
    )
    assert_sampled(reference.model, sampled)
    told = [greedy[-1].prompt_logprobs[position] for position in range(1, len(PROMPTS[-1]))]
    assert told == pytest.approx(reference.prompt_logprobs, abs=1e-4)
    report = compare_beams(reference.beams, driver.search.finish())
    report.assert_cuts_are_rare()


def recompute(sequence: Sent) -> None:
    """Have a sequence sent again as a whole, with nothing computed."""
    sequence.num_computed, sequence.is_sent = 0, False


def assert_sampled(model: Any, sequence: Sent) -> None:
    output = sequence.output[:NUM_TOKENS]
    expected = expected_sample(model, PROMPTS[1], output, SAMPLED)
    assert_equal_greedy([expected.token_ids], [expected.margins], [output])
