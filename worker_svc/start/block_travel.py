"""Blocks that travel: how many a worker keeps of others, and the name of the form in which it stores its own."""

import torch

from common.block_reads import FRAME_BYTES
from common.bounds import MOST_READ_BLOCKS
from worker_svc.loaded_model import TravellingBlocks
from worker_svc.memory.kv_pool import BlockShape, KVPool
from worker_svc.steps.fetched_blocks import FetchedBlocks
from worker_svc.steps.pool_reader import PoolReader
from worker_svc.steps.streams import DeviceStreams

# By default; a small pool has room beside it anyway, and of a large one little is on its way at once.
_POOL_PART = 16
_LEAST_BYTES, _MOST_BYTES = 16 << 20, 256 << 20


def num_fetched_blocks(memory_bytes: int | None, num_blocks: int, bytes_per_block: int) -> int:
    """Blocks that are kept until they are placed, for a setting of so many bytes; never more than the pool has."""
    if memory_bytes is None:
        memory_bytes = min(_MOST_BYTES, max(_LEAST_BYTES, num_blocks * bytes_per_block // _POOL_PART))
    return min(memory_bytes // bytes_per_block, num_blocks, MOST_READ_BLOCKS)


def block_format(fingerprint: str, weights: str, shape: BlockShape, layout: str) -> str:
    """Name for PoolInfo: equal for workers that store the same tokens in the same bytes, up to rounding.

    Weights that are quantised give other keys and values, so their form is part of it.
    """
    dtype = str(shape.dtype).removeprefix("torch.")
    sizes = "x".join(map(str, shape.sizes))
    return f"{fingerprint} {weights} {dtype} {sizes} {layout}"


def travelling_blocks(pool: KVPool, fetched: FetchedBlocks, format: str) -> TravellingBlocks | None:
    """Ways of blocks out of the pool and into it; None if the worker has no memory for those of others."""
    if not fetched.max_blocks:
        return None
    most_blocks = max(1, FRAME_BYTES // pool.shape.bytes_per_block)
    streams = DeviceStreams(pool.device) if pool.device.type == "cuda" else None
    with torch.inference_mode():
        return TravellingBlocks(format, PoolReader(pool, most_blocks, streams), fetched)
