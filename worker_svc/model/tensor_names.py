"""Names and shapes of each family's tensors.

Needs no torch: a tensor that is missing or has another shape is refused before torch is loaded.
"""

from collections.abc import Collection, Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.model.config import Family, ModelConfig

HEAD = "lm_head.weight"
# Constants that older versions of `transformers` saved beside the weights.
_SAVED_CONSTANTS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names of a family's tensors, without ".weight" and ".bias"."""

    prefixes: tuple[str, ...]  # of all names but the head's; the one in use depends on how the model was saved
    embedding: str
    positions: str = ""
    layer: str
    attention_norm: str
    qkv: tuple[str, ...]
    out: str
    mlp_norm: str
    up: tuple[str, ...]
    down: str
    final_norm: str
    transposed: bool = False  # matrices are [in, out]


NAMES = {
    Family.LLAMA: TensorNames(
        prefixes=("model.", ""),
        embedding="embed_tokens",
        layer="layers.{}.",
        attention_norm="input_layernorm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.o_proj",
        mlp_norm="post_attention_layernorm",
        up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        final_norm="norm",
    ),
    Family.OPT: TensorNames(
        prefixes=("model.decoder.", "decoder."),
        embedding="embed_tokens",
        positions="embed_positions",
        layer="layers.{}.",
        attention_norm="self_attn_layer_norm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        up=("fc1",),
        down="fc2",
        final_norm="final_layer_norm",
    ),
    Family.GPT2: TensorNames(
        prefixes=("transformer.", ""),
        embedding="wte",
        positions="wpe",
        layer="h.{}.",
        attention_norm="ln_1",
        qkv=("attn.c_attn",),
        out="attn.c_proj",
        mlp_norm="ln_2",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        final_norm="ln_f",
        transposed=True,
    ),
}
NAMES[Family.OLMO2] = replace(
    NAMES[Family.LLAMA], attention_norm="post_attention_layernorm", mlp_norm="post_feedforward_layernorm"
)


class NeededTensor(NamedTuple):
    """A tensor that a config calls for."""

    name: str
    shape: tuple[int, ...]


def find_prefix(config: ModelConfig, tensors: Container[str], folder: Path) -> str:
    """The prefix of all names but the head's. Raises CheckpointError if no tensor has a known prefix."""
    names = NAMES[config.family]
    embeddings = [f"{prefix}{names.embedding}.weight" for prefix in names.prefixes]
    for prefix, embedding in zip(names.prefixes, embeddings, strict=True):
        if embedding in tensors or f"{prefix}{names.layer.format(0)}{names.qkv[0]}.weight" in tensors:
            return prefix
    raise CheckpointError(
        f"{folder} has no tensor {' or '.join(embeddings)}, as {config.architecture} must: "
        "check that config.json belongs to these weights"
    )


def needed_tensors(config: ModelConfig, tensors: Container[str], folder: Path) -> Iterator[NeededTensor]:
    """Tensors that the decoder reads. tensors: names in the checkpoint, from which the prefix is found."""
    names = NAMES[config.family]
    prefix = find_prefix(config, tensors, folder)
    embedding = NeededTensor(f"{prefix}{names.embedding}.weight", (config.vocab_size, config.embed_dim))
    head = NeededTensor(HEAD, embedding.shape)
    if config.tie_word_embeddings:  # either stands for both; where both are there, they may differ
        ends = [each for each in (embedding, head) if each.name in tensors] or [embedding]
    else:
        ends = [embedding, head]
    yield from ends
    for each in _body(config):
        yield NeededTensor(prefix + each.name, each.shape)


def unused_tensors(config: ModelConfig, tensors: Collection[str], folder: Path) -> list[str]:
    """Names in the checkpoint that the config calls for nowhere, sorted, without what is no weight."""
    needed = {each.name for each in needed_tensors(config, tensors, folder)}
    return sorted(name for name in tensors if name not in needed and not name.endswith(_SAVED_CONSTANTS))


def _body(config: ModelConfig) -> Iterator[NeededTensor]:
    """Tensors other than embedding and head, without the prefix."""
    names, hidden, embed = NAMES[config.family], config.hidden_size, config.embed_dim
    if config.rope is None:
        yield NeededTensor(f"{names.positions}.weight", (config.position_offset + config.max_model_len, hidden))
    if hidden != embed:
        yield NeededTensor("project_in.weight", (hidden, embed))
        yield NeededTensor("project_out.weight", (embed, hidden))
    for index in range(config.num_layers):
        yield from _layer(config, names.layer.format(index))
    if config.final_norm:
        yield from _norm(config, names.final_norm, hidden)


def _layer(config: ModelConfig, layer: str) -> Iterator[NeededTensor]:
    names, hidden, inner = NAMES[config.family], config.hidden_size, config.intermediate_size
    sizes: tuple[int, ...] = (config.query_size, config.kv_size, config.kv_size)
    if len(names.qkv) == 1:
        sizes = (sum(sizes),)
    products = [(name, size, hidden, config.qkv_bias) for name, size in zip(names.qkv, sizes, strict=True)]
    products += [(name, inner, hidden, config.mlp_bias) for name in names.up]
    products += [(names.out, hidden, config.query_size, config.out_bias), (names.down, hidden, inner, config.mlp_bias)]
    for name, out_size, in_size, bias in products:
        shape = (in_size, out_size) if names.transposed else (out_size, in_size)
        yield NeededTensor(f"{layer}{name}.weight", shape)
        if bias:
            yield NeededTensor(f"{layer}{name}.bias", (out_size,))
    for name in (names.attention_norm, names.mlp_norm):
        yield from _norm(config, layer + name, hidden)
    if config.qk_norm:
        for name, size in zip(("self_attn.q_norm", "self_attn.k_norm"), config.qk_norm_sizes, strict=True):
            yield from _norm(config, layer + name, size)


def _norm(config: ModelConfig, name: str, size: int) -> Iterator[NeededTensor]:
    if config.norm_weights:
        yield NeededTensor(f"{name}.weight", (size,))
    if config.norm_weights and not config.rms_norm:
        yield NeededTensor(f"{name}.bias", (size,))
