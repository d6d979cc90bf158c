"""The decoder against `transformers`, family by family."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.equality import assert_equal_greedy
from tests.worker.paged_runner import PagedRunner, PagedSequence, forward_batch, reference_logits
from tests.worker.tiny_models import ODD_MODELS, TINY_MODELS, random_prompts, reference_greedy, write_tiny_model
from worker_svc.model.decoder import load_decoder

CPU = torch.device("cpu")
PROMPT_LENGTHS = (1, 5, 15, 16, 17, 33, 48, 63)
NUM_TOKENS = 64
NUM_BLOCKS = 80  # eight sequences of at most 63 + 64 tokens hold 8 * 8 blocks of 16
HALF_DTYPES = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # unit roundoff


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", [*TINY_MODELS, *ODD_MODELS])
def test_greedy_tokens_equal_transformers_alone_and_in_batches_with_chunked_prefill(name: str, tmp_path: Path) -> None:
    folder = write_tiny_model(name, tmp_path)
    prompts = random_prompts(PROMPT_LENGTHS)
    reference = reference_greedy(folder, prompts, NUM_TOKENS)
    assert len({tuple(tokens) for tokens in reference.tokens}) == len(prompts), "prompts must matter"
    decoder = load_decoder(folder, torch.float32, CPU)
    for batch_size, chunk in ((1, 1000), (8, 7)):
        runner = PagedRunner(decoder, num_blocks=NUM_BLOCKS, block_size=16)
        ours = runner.generate(prompts, NUM_TOKENS, batch_size=batch_size, chunk=chunk)
        assert_equal_greedy(reference.tokens, reference.margins, ours)
        assert (runner.num_mixed_steps > 0) == (batch_size > 1)


@pytest.mark.parametrize("block_size", [1, 8])
def test_greedy_tokens_do_not_depend_on_the_block_size(block_size: int, tmp_path: Path) -> None:
    folder = write_tiny_model("qwen2_window", tmp_path)
    prompts = random_prompts((3, 17, 40))
    reference = reference_greedy(folder, prompts, 24)
    runner = PagedRunner(load_decoder(folder, None, CPU), num_blocks=400 // block_size, block_size=block_size)
    ours = runner.generate(prompts, 24, batch_size=3, chunk=9)
    assert_equal_greedy(reference.tokens, reference.margins, ours)


@pytest.mark.parametrize("name", [*TINY_MODELS, *ODD_MODELS])
def test_logits_equal_those_of_transformers_to_float32_rounding(name: str, tmp_path: Path) -> None:
    folder = write_tiny_model(name, tmp_path)
    prompt = random_prompts((70,))[0]
    reference = _reference_logits(folder, prompt, torch.float32)
    error = (_paged_logits(folder, prompt, torch.float32) - reference).abs()
    assert error.max() <= 1e-4 * reference.std()


@pytest.mark.long
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("name", [*TINY_MODELS, *ODD_MODELS])
def test_half_precision_logits_are_as_good_as_those_of_transformers(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = write_tiny_model(name, tmp_path, dtype=dtype)
    prompt = random_prompts((70,))[0]
    exact = _reference_logits(folder, prompt, torch.float32)
    theirs = (_reference_logits(folder, prompt, dtype) - exact).abs()
    ours = (_paged_logits(folder, prompt, dtype) - exact).abs()
    eps = HALF_DTYPES[dtype] * float(exact.abs().max())
    assert ours.max() <= 2 * theirs.max() + eps
    assert ours.mean() <= 2 * theirs.mean() + eps / 10


def test_only_the_wanted_rows_go_through_the_head(tmp_path: Path) -> None:
    decoder = load_decoder(write_tiny_model("llama_gqa", tmp_path), None, CPU)
    runner = PagedRunner(decoder, num_blocks=4, block_size=16)
    sequence = PagedSequence(random_prompts((20,))[0], 20, block_table=[2, 0])
    every = reference_logits(decoder, forward_batch([sequence], [20], 16, all_logits=True), runner.pool)
    last = reference_logits(decoder, forward_batch([sequence], [20], 16), runner.pool)
    assert every.shape == (20, decoder.config.vocab_size)
    assert last.shape == (1, decoder.config.vocab_size)
    torch.testing.assert_close(last[0], every[-1], rtol=1e-4, atol=1e-4)


def test_a_chunk_without_wanted_rows_gives_no_logits_and_fills_the_cache(tmp_path: Path) -> None:
    decoder = load_decoder(write_tiny_model("gpt2", tmp_path), None, CPU)
    runner = PagedRunner(decoder, num_blocks=4, block_size=16)
    sequence = PagedSequence(random_prompts((20,))[0], 20, block_table=[3, 1])
    batch = forward_batch([sequence], [12], 16)
    unwanted = {name: getattr(batch, name) for name in batch.__slots__} | {
        "logit_rows": torch.tensor([], dtype=torch.int64)
    }
    assert reference_logits(decoder, type(batch)(**unwanted), runner.pool).shape == (0, decoder.config.vocab_size)
    assert runner.pool.key_cache(0)[3, :12].isfinite().all()
    assert runner.pool.key_cache(0)[3, 12:].isnan().all()
    assert runner.pool.key_cache(0)[1].isnan().all()


def test_copied_blocks_continue_as_the_original_does(tmp_path: Path) -> None:
    decoder = load_decoder(write_tiny_model("llama_gqa", tmp_path), None, CPU)
    runner = PagedRunner(decoder, num_blocks=20, block_size=16)
    first = PagedSequence(random_prompts((40,))[0], 40)
    runner.step([first], 100)
    copy = [runner.free_blocks.pop() for _ in first.block_table]
    runner.pool.copy_blocks(list(zip(first.block_table, copy, strict=True)))
    second = PagedSequence(list(first.token_ids), 40, copy, first.num_computed_tokens)
    for _ in range(8):
        runner.step([first], 1)
    for _ in range(8):
        runner.step([second], 1)
    assert first.output == second.output


def _reference_logits(folder: Path, prompt: list[int], dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return logits.float()


def _paged_logits(folder: Path, prompt: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Logits of every position: a first chunk of 40, one of 20, then token by token through the cache."""
    decoder = load_decoder(folder, dtype, CPU)
    runner = PagedRunner(decoder, num_blocks=8, block_size=16)
    sequence = PagedSequence(prompt, len(prompt), block_table=[6, 1, 4, 3, 7])
    parts = []
    for count in (40, 20, *[1] * (len(prompt) - 60)):
        batch = forward_batch([sequence], [count], 16, all_logits=True)
        parts.append(reference_logits(decoder, batch, runner.pool))
        sequence.num_computed_tokens += count
    return torch.cat(parts)
