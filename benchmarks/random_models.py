"""Checkpoints of a given shape with random weights, LLaMA's layout, and a tokenizer that has a text for every token.

    python -m benchmarks.random_models 8b FOLDER [--device cuda]

Weights are drawn on the device, a GPU where there is one, and written as they are made. What such a model says means
nothing; what it costs to run is what a trained one of its shape costs.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

MEMORY_FOLDER = Path("/dev/shm")
CONFIG_FILE = "config.json"
_STD = 0.02
_LAYERS_PER_FILE = 8
_SPARE_BYTES = 8 << 30  # of a file system in memory: for everything else that lies there
_SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A LLaMA in numbers."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    tied: bool = False
    rope_theta: float = 500_000.0

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Shape of a LLaMA checkpoint."""
        config = json.loads((folder / CONFIG_FILE).read_text())
        shape = cls(
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            max_model_len=config["max_position_embeddings"],
            tied=config["tie_word_embeddings"],
            rope_theta=config["rope_parameters"]["rope_theta"],
        )
        assert config.get("head_dim", shape.head_dim) == shape.head_dim, "other head sizes are not counted right here"
        return shape

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_step_weights(self) -> int:
        """Weights that a step reads: all but the embedding, of which it reads a row a token, unless it is the head."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        return self.num_layers * layer + self.hidden_size + self.vocab_size * self.hidden_size

    @property
    def kv_values_per_token(self) -> int:
        """KV values of a token, in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


SHAPES = {
    "8b": ModelShape(
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=14336,
        vocab_size=128_256,
        max_model_len=8192,
    ),
    "1b": ModelShape(
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=8192,
        vocab_size=128_256,
        max_model_len=8192,
        tied=True,
    ),
    "400m": ModelShape(
        hidden_size=1024,
        num_layers=24,
        num_heads=16,
        num_kv_heads=8,
        intermediate_size=4096,
        vocab_size=32_000,
        max_model_len=2048,
    ),
    "550m": ModelShape(  # heads of 128, none shared
        hidden_size=1536,
        num_layers=16,
        num_heads=12,
        num_kv_heads=12,
        intermediate_size=4096,
        vocab_size=32_000,
        max_model_len=2048,
    ),
    "206m": ModelShape(  # heads of 64, none shared, the vocabulary of OPT
        hidden_size=1024,
        num_layers=12,
        num_heads=16,
        num_kv_heads=16,
        intermediate_size=2816,
        vocab_size=50_272,
        max_model_len=2048,
        tied=True,
    ),
    "216m": ModelShape(  # heads of 128 in groups, a large vocabulary
        hidden_size=768,
        num_layers=16,
        num_heads=6,
        num_kv_heads=2,
        intermediate_size=2048,
        vocab_size=150_016,
        max_model_len=2048,
        tied=True,
    ),
    "100m": ModelShape(  # heads of 64, none shared
        hidden_size=640,
        num_layers=12,
        num_heads=10,
        num_kv_heads=10,
        intermediate_size=1728,
        vocab_size=32_000,
        max_model_len=2048,
    ),
    "125m": ModelShape(
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=4,
        intermediate_size=2048,
        vocab_size=32_000,
        max_model_len=2048,
    ),
    "8m": ModelShape(
        hidden_size=256,
        num_layers=6,
        num_heads=8,
        num_kv_heads=4,
        intermediate_size=512,
        vocab_size=8_000,
        max_model_len=2048,
    ),
    "tiny": ModelShape(
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=112,
        vocab_size=512,
        max_model_len=2048,
    ),
}


def write_random_model(
    shape: ModelShape, folder: Path, device: torch.device, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Path:
    """Makes the folder, which may not hold another model, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(seed)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, shapes in enumerate(_files(shape), 1):
        tensors = {name: _random(size, generator, dtype) for name, size in shapes.items()}
        file = f"model-{number:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / CONFIG_FILE).write_text(json.dumps(_config(shape, dtype), indent=2))
    _tokenizer(shape.vocab_size).save(str(folder / "tokenizer.json"))
    special = dict(zip(("bos_token", "eos_token", "pad_token"), _SPECIAL_TOKENS, strict=True))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.max_model_len, **special})
    )
    return folder


def scratch_folder(num_bytes: int) -> Path:
    """A new folder with room for so many bytes: in memory where that leaves enough, else among temporary files."""
    in_memory = MEMORY_FOLDER.is_dir() and shutil.disk_usage(MEMORY_FOLDER).free > num_bytes + _SPARE_BYTES
    return Path(tempfile.mkdtemp(prefix="quire-model-", dir=MEMORY_FOLDER if in_memory else None))


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _files(shape: ModelShape) -> Iterator[dict[str, tuple[int, ...]]]:
    """Sizes of tensors by name, file by file."""
    for first in range(0, shape.num_layers, _LAYERS_PER_FILE):
        tensors: dict[str, tuple[int, ...]] = {}
        for layer in range(first, min(first + _LAYERS_PER_FILE, shape.num_layers)):
            tensors |= {f"model.layers.{layer}.{name}.weight": size for name, size in _layer(shape).items()}
        yield tensors
    ends = {
        "model.embed_tokens.weight": (shape.vocab_size, shape.hidden_size),
        "model.norm.weight": (shape.hidden_size,),
    }
    yield ends if shape.tied else {**ends, "lm_head.weight": (shape.vocab_size, shape.hidden_size)}


def _layer(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden),
        "self_attn.o_proj": (hidden, query),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }


def _random(size: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Make a random tensor; norms are ones. On the host, since files are written from there."""
    if len(size) == 1:
        return torch.ones(size, dtype=dtype)
    tensor = torch.empty(size, dtype=dtype, device=generator.device)
    return tensor.normal_(std=_STD, generator=generator).cpu()


def _config(shape: ModelShape, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_model_len,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": shape.tied,
        "vocab_size": shape.vocab_size,
    }


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Make a byte tokenizer; ids beyond bytes get made-up words, so that every id has a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters, len(_SPECIAL_TOKENS))}
    vocab |= {name: number for number, name in enumerate(_SPECIAL_TOKENS)}
    assert len(vocab) <= vocab_size, "a vocabulary has at least all bytes"
    vocab |= {f"Ġw{number:x}": number for number in range(len(vocab), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    return tokenizer


def main() -> None:
    """Reads the command line and writes one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", type=torch.device, default=default_device())
    options = parser.parse_args()
    began_s = time.monotonic()
    write_random_model(SHAPES[options.shape], options.folder, options.device)
    print(f"{options.folder} is written after {time.monotonic() - began_s:.1f} s")


if __name__ == "__main__":
    main()
