"""The CPU's own forward pass against `transformers` and the plain decoder, family by family."""

from pathlib import Path

import pytest
import torch

from tests.equality import assert_equal_greedy
from tests.worker.paged_runner import PagedRunner
from tests.worker.tiny_models import TINY_MODELS, random_prompts, reference_greedy, write_tiny_model
from worker_svc.host.host_decoder import HostDecoder
from worker_svc.host.start import choose_host
from worker_svc.model.decoder import load_decoder

CPU = torch.device("cpu")
PROMPT_LENGTHS = (1, 5, 15, 16, 17, 33, 48)
NUM_TOKENS = 24
NUM_BLOCKS = 40


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def host_decoder(folder: Path, dtype: torch.dtype, kernels: str) -> HostDecoder:
    host = choose_host(kernels, dtype, int8_weights=False)
    return HostDecoder(load_decoder(folder, dtype, CPU, host.packing.make_product), host.kernels)


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
