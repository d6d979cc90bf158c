"""Bound of the fetched blocks that one step of a worker places, so that the rows of others hardly wait for it.

A pure function of what a worker says of itself.
"""

# A processor copies so much in half a millisecond, before it computes. An accelerator has the link to its memory idle
# meanwhile, and no row waits but those of the group that the blocks are for.
CPU_BYTES = 2 << 20
ACCELERATOR_BYTES = 64 << 20


def max_placed_blocks(bytes_per_block: int, device: str) -> int:
    """Return how many blocks a step with rows of others places at most; at least one."""
    num_bytes = CPU_BYTES if device.startswith("cpu") else ACCELERATOR_BYTES
    return max(1, num_bytes // max(1, bytes_per_block))
