"""Models with KV in int8: near those without, batch-invariant, and blocks move as others do."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.native.native_kernels import native_kernels
from kernels.native.packed_product import ProductMaker
from tests.worker.paged_runner import PagedRunner, PagedSequence, forward_batch
from tests.worker.tiny_models import TINY_MODELS, random_prompts, write_tiny_model
from worker_svc.cpu.host_decoder import HostDecoder
from worker_svc.cpu.start import choose_host
from worker_svc.memory.kv_pool import BlockShape, KVPool
from worker_svc.model.decoder import load_decoder
from worker_svc.option_check import DeviceError

CPU = torch.device("cpu")
PROMPT_LENGTHS = (1, 5, 15, 16, 17, 33, 48)
NUM_BLOCKS = 40
MOST_ERROR = 0.06  # rounded they are, and random weights make more of it
SCORES_TIMES = {"llama_yarn": (0.1 * math.log(4) + 1) ** 2}  # by its factor: so is what rounding makes of the scores


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def host_decoder(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> HostDecoder:
    return HostDecoder(load_decoder(write_tiny_model(name, folder), dtype, CPU, ProductMaker()), native_kernels())


def chunked_logits(decoder: HostDecoder, kv_dtype: torch.dtype | None, block_size: int) -> Tensor:
    """Logits of every prompt's last token. Prompts run in chunks side by side; later chunks read earlier ones."""
    runner = PagedRunner(decoder, num_blocks=120, block_size=block_size, kv_dtype=kv_dtype)
    prompts = random_prompts((48,) * 4)
    sequences = [PagedSequence(list(prompt), len(prompt)) for prompt in prompts]
    while len(sequences[0].output) < 1:
        logits = runner.step(sequences, 7).float().clone()
    return logits


@pytest.mark.parametrize("block_size", [16, 5])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_are_near_those_with_keys_and_values_in_float32(name: str, block_size: int, tmp_path: Path) -> None:
    decoder = host_decoder(name, tmp_path)
    exact, near = (chunked_logits(decoder, kv_dtype, block_size) for kv_dtype in (None, torch.int8))
    error = (near - exact).norm() / exact.norm()
    assert 0 < error < MOST_ERROR * SCORES_TIMES.get(name, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama_gqa", "llama_biases", "mistral", "gpt2"])
def test_tokens_are_the_same_alone_and_in_batches_with_chunked_prefill(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    decoder = host_decoder(name, tmp_path, dtype)
    prompts = random_prompts(PROMPT_LENGTHS)
    alone, together = (
        PagedRunner(decoder, num_blocks=NUM_BLOCKS, block_size=16, kv_dtype=torch.int8).generate(
            prompts, 24, batch_size=batch_size, chunk=chunk
        )
        for batch_size, chunk in ((1, 1000), (7, 7))
    )
    assert alone == together


def test_blocks_that_were_copied_and_swapped_give_the_same_bits(tmp_path: Path) -> None:
    decoder = host_decoder("llama_gqa", tmp_path)
    pool = KVPool(decoder.block_shape(16, torch.int8), 12, CPU, num_host_blocks=3)
    (prompt,) = random_prompts((42,))
    sequence = PagedSequence(list(prompt), len(prompt), block_table=[7, 2, 9])
    decoder.forward(forward_batch([sequence], [41], 16), pool)
    sequence.num_computed_tokens = 41
    pool.copy_blocks([(7, 0), (2, 7), (9, 5)])  # a source that is also a destination
    pool.swap_out([(0, 2), (7, 0), (5, 1)])
    pool.blocks[[0, 7, 5]] = 1
    pool.swap_in([(2, 11), (0, 4), (1, 3)])
    before = decoder.forward(forward_batch([replace(sequence, block_table=[11, 4, 3])], [1], 16), pool).clone()
    pool.copy_blocks([(11, 1), (4, 6), (3, 8)])
    after = decoder.forward(forward_batch([replace(sequence, block_table=[1, 6, 8])], [1], 16), pool)
    assert torch.equal(before, after)
    undisturbed = KVPool(decoder.block_shape(16, torch.int8), 3, CPU)
    fresh = replace(sequence, block_table=[2, 0, 1], num_computed_tokens=0)
    assert torch.equal(before[-1:], decoder.forward(forward_batch([fresh], [42], 16), undisturbed)[-1:])


def test_a_block_has_room_for_its_scales_and_takes_little_more_than_a_quarter_of_float32() -> None:
    wide = BlockShape(num_layers=3, num_kv_heads=2, head_dim=32, block_size=16, dtype=torch.float32)
    small = replace(wide, dtype=torch.int8)
    assert small.bytes_per_block == 3 * 2 * 16 * 2 * (32 + 4)  # layers, K and V, tokens, heads, bytes and a scale
    assert wide.bytes_per_block / small.bytes_per_block == pytest.approx(128 / 36)
    assert KVPool(small, num_blocks=5, device=CPU).blocks.nbytes == 5 * small.bytes_per_block


@pytest.mark.parametrize(("kernels", "dtype"), [("torch", torch.float32), ("auto", torch.float16)], ids=str)
def test_without_native_kernels_int8_is_refused(kernels: str, dtype: torch.dtype) -> None:
    with pytest.raises(DeviceError, match=r"--kv-dtype int8 needs native kernels, and (--kernels torch|.* float16)"):
        choose_host(kernels, dtype, int8_weights=False, int8_kv=True)
