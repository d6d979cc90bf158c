"""Shards of a model: what each rank reads and holds, what the group keeps together, and what cannot be divided."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.random_models import ModelShape, write_random_model
from tests.worker.tiny_models import TINY_MODELS, write_tiny_model
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.decoder import Decoder, load_decoder
from worker_svc.model.families import read_model_config
from worker_svc.model.layers import Linear, Product
from worker_svc.model.model_part import ModelPart, check_divisible, rank_config
from worker_svc.option_check import OptionError

CPU = torch.device("cpu")
# Large enough that norms, which every rank holds whole, hardly count.
SHAPE = ModelShape(
    hidden_size=512,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=1360,
    vocab_size=6000,
    max_model_len=1024,
)


def load(folder: Path, rank: int = 0, num_ranks: int = 1) -> Decoder:
    return load_decoder(folder, torch.float32, CPU, model_part=ModelPart(rank, num_ranks))


def weight_of(product: Product) -> Tensor:
    assert isinstance(product, Linear)
    return product.weight


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_holds_its_part_of_weights_and_blocks(tmp_path: Path, num_ranks: int) -> None:
    write_random_model(SHAPE, tmp_path, CPU, dtype=torch.bfloat16)
    whole = load(tmp_path)
    block_bytes = KVPool(whole.block_shape(16), 3, CPU, 2).blocks.nbytes
    for rank in range(num_ranks):
        model_part = load(tmp_path, rank, num_ranks)
        assert model_part.weight_bytes * num_ranks == pytest.approx(whole.weight_bytes, rel=0.02)
        assert model_part.num_parameters * num_ranks == pytest.approx(whole.num_parameters, rel=0.02)  # as read
        pool = KVPool(model_part.block_shape(16), 3, CPU, 2)
        assert pool.blocks.nbytes * num_ranks == block_bytes


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_learned_positions_and_the_vocabulary_are_divided_too(tmp_path: Path, family: str) -> None:
    write_tiny_model(family, tmp_path)
    whole, shards = load(tmp_path), [load(tmp_path, rank, 4) for rank in range(4)]
    assert whole.position_embedding is not None
    assert torch.equal(torch.cat([model_part.token_embedding for model_part in shards]), whole.token_embedding)
    positions = [model_part.position_embedding for model_part in shards]
    assert torch.equal(torch.cat([each for each in positions if each is not None]), whole.position_embedding)
    assert torch.equal(torch.cat([weight_of(model_part.head) for model_part in shards]), weight_of(whole.head))


@pytest.mark.parametrize("family", TINY_MODELS)
def test_partial_products_add_up_to_those_of_the_whole_model(tmp_path: Path, family: str) -> None:
    """With biases: one rank alone adds that of a product that is summed."""
    write_tiny_model(family, tmp_path)
    whole, shards = load(tmp_path), [load(tmp_path, rank, 2) for rank in range(2)]
    inputs = torch.randn(5, whole.config.intermediate_size, dtype=torch.float32)
    attended = torch.randn(5, whole.config.query_size, dtype=torch.float32)
    for index, layer in enumerate(whole.layers):
        parts = [model_part.layers[index] for model_part in shards]
        down = [part.mlp.down(each) for part, each in zip(parts, inputs.chunk(2, dim=1), strict=True)]
        assert torch.allclose(down[0] + down[1], layer.mlp.down(inputs), atol=1e-4)
        out = [part.attention.out(each) for part, each in zip(parts, attended.chunk(2, dim=1), strict=True)]
        assert torch.allclose(out[0] + out[1], layer.attention.out(attended), atol=1e-4)


def test_ranks_that_outnumber_key_and_value_heads_hold_the_same_ones(tmp_path: Path) -> None:
    write_tiny_model("llama_gqa", tmp_path)
    whole, shards = load(tmp_path), [load(tmp_path, rank, 4) for rank in range(4)]
    config = whole.config
    assert config.num_kv_heads == 2
    assert [model_part.config.num_kv_heads for model_part in shards] == [1, 1, 1, 1]
    qkv = weight_of(whole.layers[0].attention.qkv)
    keys = qkv[config.query_size : config.query_size + config.kv_size].chunk(2)
    for model_part, expected in zip(shards, (keys[0], keys[0], keys[1], keys[1]), strict=True):
        own = weight_of(model_part.layers[0].attention.qkv)
        assert torch.equal(own[config.head_dim : 2 * config.head_dim], expected)


@pytest.mark.parametrize(
    ("changes", "num_ranks", "possible"),
    [
        ({}, 3, "give --tensor-parallel 1, 2 or 4"),
        ({"intermediate_size": 111}, 2, "give --tensor-parallel 1"),
        ({"num_heads": 12, "num_kv_heads": 6, "intermediate_size": 120}, 4, "give --tensor-parallel 1, 2, 3, 6 or 12"),
        ({"vocab_size": 15}, 4, "give --tensor-parallel 1 or 2"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_with_what_can_be(
    tmp_path: Path, changes: dict[str, int], num_ranks: int, possible: str
) -> None:
    config = replace(read_model_config(write_tiny_model("llama_gqa", tmp_path)), **changes)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=f"--tensor-parallel {num_ranks} does not divide this model.*: {possible}$"):
        check_divisible(config, num_ranks)


def test_the_shape_of_a_rank_keeps_what_is_not_divided(tmp_path: Path) -> None:
    config = read_model_config(write_tiny_model("llama_gqa", tmp_path))
    part = rank_config(config, 2)
    assert (part.num_heads, part.num_kv_heads, part.intermediate_size) == (2, 1, 56)
    assert (part.hidden_size, part.vocab_size, part.head_dim) == (64, 211, 16)
