"""Content hashes of blocks, chained so that a hash names a block and everything before it.

Pure functions of a seed and token ids, equal in every process; they know nothing of blocks in memory.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from functools import cache


def root_hash(seed: bytes) -> bytes:
    """Parent hash of a first block. Sequences with different seeds (tenant, cache salt) never share."""
    return hashlib.sha256(seed).digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block: SHA-256 over the parent's hash and the ids as little-endian int32."""
    return hashlib.sha256(parent + _int32_packer(len(token_ids))(*token_ids)).digest()


def hash_tail(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of the first tokens of a block that is not full: no full block has it, whatever its size."""
    return hashlib.sha256(b"tail" + hash_block(parent, token_ids)).digest()


def extend_block_hashes(
    hashes: list[bytes], seed: bytes, token_ids: Sequence[int], block_size: int, num_blocks: int
) -> None:
    """Append the missing hashes of the first `num_blocks` blocks; each is computed once."""
    if len(hashes) >= num_blocks:
        return
    parent = hashes[-1] if hashes else root_hash(seed)
    for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)


@cache
def _int32_packer(num_ids: int) -> Callable[..., bytes]:
    """Return what packs so many ids, no more than a block has: to read its format takes longer than to pack them."""
    return struct.Struct(f"<{num_ids}i").pack
