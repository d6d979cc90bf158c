"""Random checkpoints are what `transformers` takes for a model of that shape, and their sizes are counted right."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.random_models import SHAPES, ModelShape, write_random_model
from worker_svc.model.decoder import load_decoder

CPU = torch.device("cpu")


def test_a_random_checkpoint_loads_and_its_step_weights_are_all_but_the_embedding(tmp_path: Path) -> None:
    folder = write_random_model(SHAPES["tiny"], tmp_path / "model", CPU)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    assert ModelShape.of(folder) == SHAPES["tiny"]
    (embedding,) = (each.numel() for name, each in model.named_parameters() if "embed_tokens" in name)
    assert sum(each.numel() for each in model.parameters()) - embedding == SHAPES["tiny"].num_step_weights
    decoder = load_decoder(folder, torch.float32, CPU)
    ours = decoder.block_shape(1).bytes_per_block / 4
    assert ours == SHAPES["tiny"].kv_values_per_token


def test_the_same_seed_draws_the_same_weights(tmp_path: Path) -> None:
    files = [write_random_model(SHAPES["tiny"], tmp_path / name, CPU) / "model-00001.safetensors" for name in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_every_token_has_a_text(tmp_path: Path) -> None:
    folder = write_random_model(SHAPES["tiny"], tmp_path / "model", CPU)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == SHAPES["tiny"].vocab_size
    text = "Grüße, 世界"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert all(tokenizer.decode([token]) for token in range(3, SHAPES["tiny"].vocab_size))


def test_the_large_one_has_eight_billion_weights() -> None:
    shape = SHAPES["8b"]
    assert round((shape.num_step_weights + shape.vocab_size * shape.hidden_size) / 1e9, 2) == 8.03
    assert 2 * shape.kv_values_per_token == 131_072  # bytes a token in bfloat16
