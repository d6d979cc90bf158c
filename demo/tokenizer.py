"""The tokenizer of the demo model: byte-level BPE trained on the demo documents, and its chat template.

Writes the files that `transformers` and `tokenizers` read. Knows no model.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from demo.chats import ASSISTANT, BOS, EOS, PAD, SPECIAL_TOKENS, SYSTEM, USER
from demo.stories import documents

VOCAB_SIZE = 2048
NUM_TRAINING_DOCUMENTS = 20_000

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    f"{{% if message['role'] == 'system' %}}{{{{ '{SYSTEM}' + message['content'] | trim }}}}"
    f"{{% elif message['role'] == 'user' %}}{{{{ '{USER}' + message['content'] | trim }}}}"
    "{% elif message['role'] == 'assistant' %}"
    f"{{{{ '{ASSISTANT}' + message['content'] | trim + eos_token }}}}"
    "{% else %}{{ raise_exception('The roles are system, user and assistant.') }}{% endif %}{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{ASSISTANT}' }}}}{{% endif %}}"
)


def train_tokenizer(seed: int) -> Tokenizer:
    """A tokenizer of `VOCAB_SIZE` entries; the special tokens come first, digits stand alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]|\s+(?!\S)|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_plain_texts(seed), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def _plain_texts(seed: int) -> Iterator[str]:
    for document in islice(documents(seed), NUM_TRAINING_DOCUMENTS):
        for token in SPECIAL_TOKENS:
            document = document.replace(token, "\n")
        yield document


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json, its configuration, and the chat template in both places where readers look."""
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "special_tokens_map.json", special)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write `value` as the Hugging Face tools do: indented, with a last line end."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
