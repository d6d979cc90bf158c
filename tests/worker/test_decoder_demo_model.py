"""The decoder on the demo model, whose weights are trained and whose checkpoint is in bfloat16."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.equality import assert_equal_greedy
from tests.worker.paged_runner import PagedRunner
from tests.worker.tiny_models import reference_greedy
from worker_svc.checkpoint.model_folder import resolve_checkpoint
from worker_svc.model.decoder import load_decoder

FOLDER = Path(__file__).parents[2] / "demo" / "model"
TEXTS = (
    "Once",
    "Once upon a time",
    "The dog was hungry, so",
    "It was a cold and rainy day. Anna looked out of the window and",
    "Tom had a red ball. He gave the ball to Mia. Mia was happy because",
    "A small bird lived in an old tree near the river. Every morning the bird",
    "Question: What colour is the sky? Answer:",
    "On Monday the cat found a key. On Tuesday the cat found a box. On Wednesday the cat",
)


@pytest.mark.long
def test_the_demo_model_continues_texts_as_transformers_does_alone_and_in_batches() -> None:
    torch.set_num_threads(1)
    folder = resolve_checkpoint(str(FOLDER))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    reference = reference_greedy(folder, prompts, 64)
    decoder = load_decoder(folder, torch.float32, torch.device("cpu"))
    for batch_size, chunk in ((1, 1000), (8, 5)):
        runner = PagedRunner(decoder, num_blocks=64, block_size=16)
        ours = runner.generate(prompts, 64, batch_size=batch_size, chunk=chunk)
        assert_equal_greedy(reference.tokens, reference.margins, ours)
