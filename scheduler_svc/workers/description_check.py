"""Check of the description that a worker gives of itself, so that no figure in it costs memory or time.

Bounds are far above any machine or model. Knows the message and its bytes, not the worker. Pure.
"""

from google.protobuf.message import DecodeError

from common.bounds import MOST_SEATS
from common.wire_scan import ScannedField, WireScan
from quire.v1 import worker_pb2

MAX_BLOCKS = 1 << 22  # of a pool; the scheduler keeps some 50 bytes of each
MAX_BLOCK_SIZE = 1 << 16
MAX_TOKENS = 1 << 27  # of a context, or of one step
MAX_VOCAB_SIZE = 1 << 22
MAX_EOS_TOKENS = 256
MAX_NAME_CHARS = 1024
MAX_TOKENIZER_BYTES = 64 << 20  # that of Gemma, the largest in use, has 33 MB
MAX_TEMPLATE_CHARS = 1 << 20
MAX_SPECIAL_TOKENS = 1024
MAX_PHASES = 256  # of its start
MAX_ID_CHARS = 128
MAX_FORMAT_CHARS = 256  # the name of the form in which blocks are stored
MAX_DESCRIPTION_BYTES = MAX_TOKENIZER_BYTES + (8 << 20)  # the rest has some kilobytes, and the template a megabyte

_LISTS = {
    4: ScannedField("tokenizer", fields={4: ScannedField("special_tokens", MAX_SPECIAL_TOKENS)}),
    9: ScannedField("startup", MAX_PHASES),
}


def read_description(data: bytes) -> worker_pb2.DescribeResponse:
    """Parse a description and check its bounds. Lists are counted before they are parsed.

    Raises ValueError that names each figure above its bound, and repeats no text of the message.
    """
    if len(data) > MAX_DESCRIPTION_BYTES:
        raise ValueError(f"it has {len(data):,} bytes, and may have {MAX_DESCRIPTION_BYTES:,}")
    scan = WireScan()
    try:
        scan.scan_message(data, _LISTS)
        if scan.excess is None:
            description = worker_pb2.DescribeResponse.FromString(data)
    except (IndexError, ValueError, DecodeError):
        raise ValueError("its bytes are no description, or have far too many fields") from None
    if scan.excess is not None:
        raise ValueError(f"{scan.excess.path} {scan.excess.words}".strip())
    description.DiscardUnknownFields()
    check_description(description)
    return description


def check_description(description: worker_pb2.DescribeResponse) -> None:
    """Raise ValueError that names each figure above its bound."""
    model, pool, files = description.model, description.pool, description.tokenizer
    ids = (description.worker_id, description.incarnation, model.fingerprint, files.fingerprint)
    names = (model.name, model.architecture, model.dtype, description.device, pool.dtype)
    phases = [each.phase for each in description.startup]
    special = [*files.special_tokens, *files.special_tokens.values()]
    figures = {
        "pool.num_blocks": (pool.num_blocks, 1, MAX_BLOCKS),
        "pool.num_host_blocks": (pool.num_host_blocks, 0, MAX_BLOCKS),
        "pool.max_fetched_blocks": (pool.max_fetched_blocks, 0, MAX_BLOCKS),
        "length of pool.block_format": (len(pool.block_format), 0, MAX_FORMAT_CHARS),
        "pool.block_size": (pool.block_size, 1, MAX_BLOCK_SIZE),
        "num_seats": (description.num_seats, 1, MOST_SEATS),
        "max_batched_tokens": (description.max_batched_tokens, 0, MAX_TOKENS),
        "model.vocab_size": (model.vocab_size, 1, MAX_VOCAB_SIZE),
        "model.max_model_len": (model.max_model_len, 2, MAX_TOKENS),
        "number of model.eos_token_ids": (len(model.eos_token_ids), 0, MAX_EOS_TOKENS),
        "length of an id or fingerprint": (max(map(len, ids)), 0, MAX_ID_CHARS),
        "length of a name": (max(map(len, [*names, *phases])), 0, MAX_NAME_CHARS),
        "length of tokenizer_json": (len(files.tokenizer_json), 0, MAX_TOKENIZER_BYTES),
        "length of chat_template": (len(files.chat_template), 0, MAX_TEMPLATE_CHARS),
        "number of special_tokens": (len(files.special_tokens), 0, MAX_SPECIAL_TOKENS),
        "length of a special token": (max(map(len, special), default=0), 0, MAX_NAME_CHARS),
    }
    wrong = [
        f"{name} is {value:,}, and may be {least:,} to {most:,}"
        for name, (value, least, most) in figures.items()
        if not least <= value <= most
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
