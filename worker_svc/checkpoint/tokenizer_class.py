"""Tokenizer class that `transformers` 5 takes for a folder, and the special tokens that the class has by default.

Classes are known by their names alone. Only some are told apart: with most others, and for some model types with every
one, `transformers` takes a tokenizer.json as it is.
"""

from enum import Enum
from pathlib import Path

from worker_svc.checkpoint.json_file import JsonTable, read_optional_table
from worker_svc.checkpoint.model_folder import CONFIG_FILE


class TokenizerClass(Enum):
    """Class that gives a tokenizer special tokens, or a tokenizer.json stages, of its own.

    The value is the declared name, without `Fast`.
    """

    LLAMA = "LlamaTokenizer"
    CODE_LLAMA = "CodeLlamaTokenizer"
    GPT2 = "GPT2Tokenizer"
    QWEN2 = "Qwen2Tokenizer"
    BERT = "BertTokenizer"  # the only one whose vocabulary may be a vocab.txt


_OF_NAME = {each.value: each for each in TokenizerClass}
# Model types with a class of their own, for folders that declare none.
_OF_MODEL_TYPE = {
    "gpt2": TokenizerClass.GPT2,
    "opt": TokenizerClass.GPT2,
    "qwen2": TokenizerClass.QWEN2,
    "qwen3": TokenizerClass.QWEN2,
}
_WITHOUT_CLASS = ("mistral", "olmo2")  # whatever their folders declare
_ALWAYS_OWN = "qwen2"  # has its class, whatever its folders declare

_ENDOFTEXT = "<|endoftext|>"
_LLAMA_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_DEFAULT_ROLES = {
    TokenizerClass.LLAMA: _LLAMA_ROLES,
    TokenizerClass.CODE_LLAMA: {
        **_LLAMA_ROLES,
        "prefix_token": "▁<PRE>",
        "middle_token": "▁<MID>",
        "suffix_token": "▁<SUF>",
        "eot_token": "▁<EOT>",
        "fill_token": "<FILL_ME>",
    },
    TokenizerClass.GPT2: dict.fromkeys(("bos_token", "eos_token", "unk_token"), _ENDOFTEXT),
    TokenizerClass.QWEN2: dict.fromkeys(("eos_token", "unk_token", "pad_token"), _ENDOFTEXT),
    TokenizerClass.BERT: {f"{role}_token": f"[{role.upper()}]" for role in ("unk", "sep", "pad", "cls", "mask")},
}


def find_class(folder: Path, settings: JsonTable, *, is_byte_level: bool) -> TokenizerClass | None:
    """The class of a folder; None if it is another. settings: its tokenizer_config.json"""
    config = read_optional_table(folder, CONFIG_FILE)
    model_type = config.raw("model_type")
    declared = (settings if settings.raw("tokenizer_class") else config).raw("tokenizer_class")
    if model_type in _WITHOUT_CLASS:
        return None
    if not isinstance(model_type, str):
        model_type = ""
    if model_type == _ALWAYS_OWN or not isinstance(declared, str) or not declared:
        return _OF_MODEL_TYPE.get(model_type)
    found = _OF_NAME.get(declared.removesuffix("Fast"))
    return None if found is TokenizerClass.LLAMA and is_byte_level else found  # LLaMA 3 declares it by mistake


def default_roles(found: TokenizerClass | None) -> dict[str, str]:
    """Special tokens by role that a folder of the class has where no file sets the role."""
    return {} if found is None else dict(_DEFAULT_ROLES[found])
