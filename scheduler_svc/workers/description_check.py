"""What a worker says of itself, checked before anything is made of it: no figure costs others memory or time.

Bounds are far above what any machine has. Pure.
"""

from quire.v1 import worker_pb2

MAX_BLOCKS = 1 << 22  # of a pool; the scheduler keeps some 50 bytes of each
MAX_SLOTS = 1 << 16
MAX_TOKENS = 1 << 27  # of a context, or of one step
MAX_VOCAB_SIZE = 1 << 22
MAX_EOS_TOKENS = 256
MAX_NAME_CHARS = 1024
MAX_TOKENIZER_BYTES = 64 << 20
MAX_TEMPLATE_CHARS = 1 << 20
MAX_SPECIAL_TOKENS = 1024


def check_description(description: worker_pb2.DescribeResponse) -> None:
    """Raises ValueError that names each figure beyond its bound."""
    model, pool, files = description.model, description.pool, description.tokenizer
    names = (model.name, model.architecture, model.dtype, description.device, pool.dtype)
    special = files.special_tokens.values()
    figures = {
        "pool.num_blocks": (pool.num_blocks, 1, MAX_BLOCKS),
        "pool.num_host_blocks": (pool.num_host_blocks, 0, MAX_BLOCKS),
        "pool.block_size": (pool.block_size, 1, MAX_SLOTS),
        "num_slots": (description.num_slots, 1, MAX_SLOTS),
        "max_batched_tokens": (description.max_batched_tokens, 0, MAX_TOKENS),
        "model.vocab_size": (model.vocab_size, 1, MAX_VOCAB_SIZE),
        "model.max_model_len": (model.max_model_len, 2, MAX_TOKENS),
        "number of model.eos_token_ids": (len(model.eos_token_ids), 0, MAX_EOS_TOKENS),
        "length of a name": (max(map(len, names)), 0, MAX_NAME_CHARS),
        "length of tokenizer_json": (len(files.tokenizer_json), 0, MAX_TOKENIZER_BYTES),
        "length of chat_template": (len(files.chat_template), 0, MAX_TEMPLATE_CHARS),
        "number of special_tokens": (len(special), 0, MAX_SPECIAL_TOKENS),
        "length of a special token": (max(map(len, special), default=0), 0, MAX_NAME_CHARS),
    }
    wrong = [
        f"{name} is {value:,}, and may be {least:,} to {most:,}"
        for name, (value, least, most) in figures.items()
        if not least <= value <= most
    ]
    if wrong:
        raise ValueError(f"what worker {description.worker_id!r} says of itself cannot be: {'; '.join(wrong)}")
