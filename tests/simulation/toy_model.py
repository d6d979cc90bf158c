"""The model of simulated workers: pure functions of the whole context, so that an undisturbed run is known in advance.

A context is known by a checksum chained over its tokens: whoever reads a wrong block gets another checksum, and other
tokens. Log-probabilities are eighths, which float32 holds and adds exactly.
"""

from collections.abc import Container
from functools import lru_cache
from zlib import crc32

VOCAB_SIZE = 64
EOS = 63
START = 0  # checksum of the empty context

_TOKEN_BYTES = [token.to_bytes(2, "little") for token in range(VOCAB_SIZE)]
_NUMBERS = [token * 0x9E3779B1 for token in range(VOCAB_SIZE)]


def extended(checksum: int, token_id: int) -> int:
    """The checksum of the context with one token more."""
    return crc32(_TOKEN_BYTES[token_id], checksum)


def drawn(checksum: int, seed: int, sample_index: int, barred: Container[int], *, is_greedy: bool) -> int:
    """The next token of a sample."""
    noise = 0 if is_greedy else (seed & 0xFFFFFFFF) + sample_index * 77 + 1
    token_id = _mix(checksum ^ noise, 12_345) % VOCAB_SIZE
    while token_id in barred:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def logprob(checksum: int, token_id: int) -> float:
    """Log-probability from -8 to -1/8."""
    return -((((checksum ^ _NUMBERS[token_id]) * 0x85EBCA6B >> 9) & 63) + 1) / 8


def rank(checksum: int, token_id: int) -> int:
    return 1 + ranking(checksum).index(token_id)


@lru_cache(maxsize=50_000)
def ranking(checksum: int) -> tuple[int, ...]:
    """Rank all tokens, the most likely first."""
    return tuple(sorted(range(VOCAB_SIZE), key=lambda token_id: (-logprob(checksum, token_id), token_id)))


def candidates(checksum: int, num_wanted: int, barred: Container[int]) -> list[tuple[int, float]]:
    """The best next tokens and their log-probabilities, best first; barred ones last, with -inf."""
    order = ranking(checksum)[: num_wanted + 8]
    allowed = [(token_id, logprob(checksum, token_id)) for token_id in order if token_id not in barred]
    return allowed[:num_wanted]


def _mix(checksum: int, number: int) -> int:
    return ((checksum ^ (number * 0x9E3779B1)) * 0x85EBCA6B & 0xFFFFFFFFFFFF) >> 13
