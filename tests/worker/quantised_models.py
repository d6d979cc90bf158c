"""Small random models whose matrices fit 8 and 4 bits, as they are loaded, and with the same numbers widened again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

from kernels.products.fp8_product import quantise_rows
from tests.worker.tiny_models import randomise
from worker_svc.gpu.quantised_products import Fp8Linear, Int4Linear, QuantisedForm, quantising_maker
from worker_svc.model.decoder import Decoder, load_decoder
from worker_svc.model.layers import Linear, Product
from worker_svc.model.model_part import WHOLE, ModelPart

HIDDEN, INTERMEDIATE = 256, 384
FAST_HIDDEN = 128  # for the interpreter
_SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def write_wide_model(family: str, folder: Path, hidden: int = HIDDEN) -> Path:
    """Write a model, llama without biases or opt with them, and return the folder."""
    shape: dict[str, Any] = {**_SHAPE, "hidden_size": hidden}
    model: PreTrainedModel
    if family == "llama":
        shape |= {"intermediate_size": INTERMEDIATE, "num_key_value_heads": 2, "tie_word_embeddings": False}
        model = LlamaForCausalLM(LlamaConfig(**shape))
    else:
        model = OPTForCausalLM(OPTConfig(**shape, ffn_dim=INTERMEDIATE, word_embed_proj_dim=32))
    randomise(model)
    model.save_pretrained(folder)
    return folder


def load_quantised(
    folder: Path, form: QuantisedForm, dtype: torch.dtype, device: torch.device, model_part: ModelPart = WHOLE
) -> Decoder:
    return load_decoder(folder, dtype, device, quantising_maker(form), model_part=model_part)


def widened(decoder: Decoder, dtype: torch.dtype) -> Decoder:
    """The decoder with the numbers of its quantised weights in `dtype`, multiplied as any other."""
    return decoder.with_layer_products(lambda each: dequantised(each, dtype))


def dequantised(product: Product, dtype: torch.dtype) -> Product:
    """The same numbers in `dtype`."""
    if isinstance(product, Int4Linear):
        return Linear(product.weight.dequantised(dtype), product.bias)
    if isinstance(product, Fp8Linear):
        return RoundingLinear(product.weight.dequantised(dtype), product.bias)
    return product


@dataclass(frozen=True, slots=True)
class RoundingLinear(Linear):
    """The product with a weight as it is, of rows that are rounded to e4m3 and widened again."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return F.linear(quantise_rows(x).dequantised(x.dtype), self.weight, self.bias)
