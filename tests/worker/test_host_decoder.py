"""The CPU's own forward pass against `transformers` and the plain decoder, family by family."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kernels.native.cpu_kernels import CpuKernels
from kernels.native.native_kernels import NativeKernels, native_kernels
from kernels.native.packed_product import ProductMaker
from quire import machine
from tests.equality import assert_equal_greedy
from tests.worker.paged_runner import PagedRunner, PagedSequence, forward_batch
from tests.worker.tiny_models import TINY_MODELS, random_prompts, reference_greedy, write_tiny_model
from worker_svc.cpu.host_decoder import HostDecoder
from worker_svc.cpu.start import choose_host
from worker_svc.model.decoder import load_decoder

CPU = torch.device("cpu")
PROMPT_LENGTHS = (1, 5, 15, 16, 17, 33, 48)
NUM_TOKENS = 24
NUM_BLOCKS = 40


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def host_decoder(folder: Path, dtype: torch.dtype, kernels: str) -> HostDecoder:
    host = choose_host(kernels, dtype, int8_weights=False, int8_kv=False)
    return HostDecoder(load_decoder(folder, dtype, CPU, host.packing.make_product), host.kernels)


@pytest.mark.long
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_greedy_tokens_equal_transformers_alone_and_in_batches_with_chunked_prefill(
    name: str, kernels: str, tmp_path: Path
) -> None:
    folder = write_tiny_model(name, tmp_path)
    prompts = random_prompts(PROMPT_LENGTHS)
    reference = reference_greedy(folder, prompts, NUM_TOKENS)
    decoder = host_decoder(folder, torch.float32, kernels)
    for batch_size, chunk in ((1, 1000), (7, 7)):
        runner = PagedRunner(decoder, num_blocks=NUM_BLOCKS, block_size=16)
        ours = runner.generate(prompts, NUM_TOKENS, batch_size=batch_size, chunk=chunk)
        assert_equal_greedy(reference.tokens, reference.margins, ours)
        assert (runner.num_mixed_steps > 0) == (batch_size > 1)


class EachByItself:
    """The same kernels without the native type: every pass calls each of them."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_recorded_pass_gives_the_same_bits_as_its_kernels_one_by_one(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    decoder = load_decoder(write_tiny_model(name, tmp_path), dtype, CPU, ProductMaker())
    kernels = native_kernels()
    runners = [
        PagedRunner(HostDecoder(decoder, each), num_blocks=NUM_BLOCKS, block_size=16)
        for each in (kernels, cast(CpuKernels, EachByItself(kernels)))
    ]
    prompts = random_prompts(PROMPT_LENGTHS)
    for runner in runners:  # the first passes want nothing, as the first chunks of a long prompt do
        first = PagedSequence(list(prompts[-1]), len(prompts[-1]), block_table=runner.free_blocks[:3])
        batch = forward_batch([first], [16], runner.pool.block_size)
        for _ in range(2):
            assert not len(runner.decoder.hidden(replace(batch, logit_rows=batch.logit_rows[:0]), runner.pool))
    running: list[list[PagedSequence]] = [[], []]
    # Rows come, buffers grow, and steps want all tokens or some.
    for number, chunk in enumerate((1, 3, 1, 16, 16, 48, 1, 1, 2, 1, 1)):
        for sequences in running:
            if number < len(prompts):
                sequences.append(PagedSequence(list(prompts[number]), len(prompts[number])))
        recorded, by_itself = (
            runner.step(sequences, chunk) for runner, sequences in zip(runners, running, strict=True)
        )
        assert torch.equal(recorded, by_itself)
    assert [each.token_ids for each in running[0]] == [each.token_ids for each in running[1]]


def test_a_small_pass_leaves_one_of_the_processors_that_a_containers_quota_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: one of the machine's processors was left, of which a container with a quota may use few at once."""
    before = torch.get_num_threads()
    monkeypatch.setattr(machine, "num_processors", lambda: 3)
    torch.set_num_threads(3)
    try:
        kernels = choose_host("native", torch.float32, int8_weights=False, int8_kv=False).kernels
    finally:
        torch.set_num_threads(before)
    assert isinstance(kernels, NativeKernels)
    assert kernels.new_program().num_threads_if_small == 2
