"""Writes a LLaMA checkpoint as a GGUF file for llama.cpp, in the precision that it has, without a vocabulary."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_BITS = {"BF16": np.uint16, "F32": np.uint32}


def write_gguf(model: Path, output: Path) -> None:
    """Write the file; it appears under its name only when it is complete."""
    config = json.loads((model / "config.json").read_text())
    partial = output.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    is_float32 = config["dtype"] == "float32"
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if is_float32 else gguf.LlamaFileType.MOSTLY_BF16)
    for name, bits in _tensors(model):
        projection = name.split(".")[-2]
        _add(writer, _renamed(name), _interleaved(bits, heads[projection]) if projection in heads else bits)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(output)


def _tensors(model: Path) -> Iterator[tuple[str, Any]]:
    """Names and bits, as unsigned numbers, of all safetensors files."""
    for file in sorted(model.glob("*.safetensors")):
        data = np.memmap(file, mode="r")
        begin = 8 + int(data[:8].view(np.uint64)[0])
        for name, about in json.loads(bytes(data[8:begin])).items():
            if name != "__metadata__":
                first, last = about["data_offsets"]
                flat = data[begin + first : begin + last].view(_BITS[about["dtype"]])
                yield name, np.array(flat).reshape(about["shape"])


def _renamed(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, *parts, _ = name.split(".")
    return f"blk.{layer}.{_LAYER_NAMES['.'.join(parts)]}.weight"


def _interleaved(bits: Any, num_heads: int) -> Any:
    """Reorder the rows of a head as llama.cpp rotates them: the two of a pair beside each other."""
    rows, columns = bits.shape
    halves = bits.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _add(writer: Any, name: str, bits: Any) -> None:
    """Add a tensor; norms are float32 in every GGUF."""
    if bits.dtype == np.uint32:
        writer.add_tensor(name, bits.view(np.float32))
    elif bits.ndim == 1:
        writer.add_tensor(name, (bits.astype(np.uint32) << 16).view(np.float32))
    else:
        as_bytes = np.ascontiguousarray(bits).view(np.uint8)
        writer.add_tensor(name, as_bytes, raw_dtype=gguf.GGMLQuantizationType.BF16)
