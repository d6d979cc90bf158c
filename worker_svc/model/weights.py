"""From a checkpoint's tensors to the parts of a decoder.

It knows what each family calls its tensors, fuses those that are multiplied by the same input, and turns matrices
that are stored the other way round. Each tensor goes to its device and dtype as it is read, so that the host never
holds the whole model beside the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.checkpoint import CheckpointError, WeightReader
from worker_svc.model.config import Family, ModelConfig
from worker_svc.model.layers import ACTIVATIONS, Attention, DecoderLayer, Linear, MakeProduct, Mlp, Norm, Product


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """What a family calls its tensors, without ".weight" and ".bias"."""

    prefixes: tuple[str, ...]  # of everything but the head, which one differs by how it was saved
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


_NAMES = {
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


class WeightLoader:
    """Reads the parts of one decoder. Shapes come from the config; a tensor that differs is refused."""

    def __init__(
        self,
        reader: WeightReader,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        make_product: MakeProduct = Linear,
    ) -> None:
        self._make_product = make_product
        self._reader = reader
        self._config = config
        self._dtype = dtype
        self._device = device
        self._names = _NAMES[config.family]
        self._prefix = self._find_prefix()
        self.num_parameters_read = 0

    def token_embedding(self) -> Tensor:
        """[vocab_size, embed_dim]"""
        return self._read(f"{self._names.embedding}.weight", self._config.vocab_size, self._config.embed_dim)

    def position_embedding(self) -> Tensor | None:
        """[position_offset + max_model_len, hidden_size], or None where positions are rotary."""
        config = self._config
        if config.rope is not None:
            return None
        rows = config.position_offset + config.max_model_len
        return self._read(f"{self._names.positions}.weight", rows, config.hidden_size)

    def projections(self) -> tuple[Product | None, Product | None]:
        """Into and out of hidden_size, where the embedding has another size."""
        hidden, embed = self._config.hidden_size, self._config.embed_dim
        if hidden == embed:
            return None, None
        return (
            self._linear("", ("project_in",), embed, (hidden,), bias=False),
            self._linear("", ("project_out",), hidden, (embed,), bias=False),
        )

    def head(self, token_embedding: Tensor) -> Product:
        """The output product, [vocab_size, embed_dim]; tied, it is the embedding itself."""
        if self._config.tie_word_embeddings:
            return Linear(token_embedding, None)
        shape = (self._config.vocab_size, self._config.embed_dim)
        return self._make_product(self._place(self._reader.read("lm_head.weight", shape)), None)

    def final_norm(self) -> Norm | None:
        return self._norm(self._names.final_norm, self._config.hidden_size) if self._config.final_norm else None

    def layer(self, index: int) -> DecoderLayer:
        """One layer, query, key and value fused, and gate and up."""
        config, names = self._config, self._names
        prefix = names.layer.format(index)
        hidden, inner = config.hidden_size, config.intermediate_size
        up = self._linear(prefix, names.up, hidden, (inner,) * len(names.up), bias=config.mlp_bias)
        down = self._linear(prefix, (names.down,), inner, (hidden,), bias=config.mlp_bias)
        return DecoderLayer(
            attention=self._attention(prefix),
            mlp=Mlp(up, down, ACTIVATIONS[config.activation], config.gated_mlp),
            attention_norm=self._norm(prefix + names.attention_norm, hidden),
            mlp_norm=self._norm(prefix + names.mlp_norm, hidden),
            norm_before=config.norm_before,
        )

    def _attention(self, prefix: str) -> Attention:
        config, names = self._config, self._names
        sizes: tuple[int, ...] = (config.query_size, config.kv_size, config.kv_size)
        if len(names.qkv) == 1:
            sizes = (sum(sizes),)
        return Attention(
            qkv=self._linear(prefix, names.qkv, config.hidden_size, sizes, bias=config.qkv_bias),
            out=self._linear(prefix, (names.out,), config.query_size, (config.hidden_size,), bias=config.out_bias),
            q_norm=self._norm(f"{prefix}self_attn.q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=self._norm(f"{prefix}self_attn.k_norm", config.head_dim) if config.qk_norm else None,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )

    def _linear(
        self, prefix: str, names: tuple[str, ...], in_size: int, out_sizes: tuple[int, ...], *, bias: bool
    ) -> Product:
        """Matrices of the same input, stacked into one."""
        weights = [
            self._matrix(f"{prefix}{name}.weight", out, in_size) for name, out in zip(names, out_sizes, strict=True)
        ]
        biases = [self._read(f"{prefix}{name}.bias", out) for name, out in zip(names, out_sizes, strict=True) if bias]
        return self._make_product(torch.cat(weights).contiguous(), torch.cat(biases) if biases else None)

    def _matrix(self, name: str, out_size: int, in_size: int) -> Tensor:
        if self._names.transposed:
            return self._read(name, in_size, out_size).t()
        return self._read(name, out_size, in_size)

    def _norm(self, name: str, size: int) -> Norm:
        config = self._config
        weight = self._read(f"{name}.weight", size) if config.norm_weights else None
        bias = self._read(f"{name}.bias", size) if config.norm_weights and not config.rms_norm else None
        return Norm(size, config.norm_eps, config.rms_norm, weight, bias)

    def _read(self, name: str, *shape: int) -> Tensor:
        return self._place(self._reader.read(self._prefix + name, shape))

    def _place(self, tensor: Tensor) -> Tensor:
        self.num_parameters_read += tensor.numel()
        return tensor.to(device=self._device, dtype=self._dtype)

    def _find_prefix(self) -> str:
        embeddings = [f"{prefix}{self._names.embedding}.weight" for prefix in self._names.prefixes]
        for prefix, embedding in zip(self._names.prefixes, embeddings, strict=True):
            if embedding in self._reader:
                return prefix
        raise CheckpointError(
            f"{self._reader.folder} has no tensor {' or '.join(embeddings)}, as {self._config.architecture} must: "
            "check that config.json belongs to these weights"
        )
