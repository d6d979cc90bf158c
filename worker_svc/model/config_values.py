"""Reads the values that the config.json files of all families share: bounded sizes, activations, dtypes."""

from typing import NamedTuple

from worker_svc.checkpoint.json_file import JsonTable
from worker_svc.model.config import Activation

MOST_POSITIONS = 1 << 24
MOST_VOCAB = 1 << 22
MOST_WIDTH = 1 << 20
MOST_LAYERS = 1 << 10
MOST_HEADS = 1 << 12
MOST_HEAD_DIM = 1 << 11
DTYPES = ("float32", "bfloat16", "float16")
CHOOSE = "choose another checkpoint"


# Names of activations in `transformers`, and the name of the same function in the kernels.
ACTIVATION_NAMES: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


class ModelSize(NamedTuple):
    """Sizes that every family has, each under its own keys."""

    vocab: int
    hidden: int
    layers: int
    heads: int


def read_size(
    raw: JsonTable,
    *,
    hidden: str = "hidden_size",
    layers: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
) -> ModelSize:
    return ModelSize(
        vocab=raw.integer("vocab_size", most=MOST_VOCAB),
        hidden=raw.integer(hidden, most=MOST_WIDTH),
        layers=raw.integer(layers, most=MOST_LAYERS),
        heads=raw.integer(heads, most=MOST_HEADS),
    )


def equal_head_dim(raw: JsonTable, hidden_key: str, size: ModelSize) -> int:
    """The size of a head where heads share the hidden size evenly."""
    if size.hidden % size.heads:
        raw.refuse(hidden_key, f"must be a multiple of the number of heads, {size.heads}")
    return size.hidden // size.heads


def read_dtype(raw: JsonTable) -> str | None:
    key = "dtype" if "dtype" in raw else "torch_dtype"
    if key not in raw:
        return None
    name = raw.text(key).removeprefix("torch.")
    if name not in DTYPES:
        raw.refuse(key, f"only {', '.join(DTYPES)} are supported", CHOOSE)
    return name


def read_activation(raw: JsonTable, key: str, default: str) -> Activation:
    name = raw.text(key, default)
    if name not in ACTIVATION_NAMES:
        raw.refuse(key, f"only {', '.join(ACTIVATION_NAMES)} are supported", CHOOSE)
    return ACTIVATION_NAMES[name]
