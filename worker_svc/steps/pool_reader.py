"""Copies blocks of the pool to main memory beside the steps, for another worker.

On a CUDA device through a stream of its own, so the steps' streams wait for nothing. The caller knows that the blocks
have been written and are not written again; on another thread than the one that executes steps.
"""

from collections.abc import Sequence

import numpy as np
import torch

from kernels.blocks.kv_blocks import swap_blocks
from worker_svc.memory.kv_pool import KVPool, as_bytes
from worker_svc.steps.streams import DeviceEvent, DeviceStreams, SideStream


class PoolReader:
    """Reader of one pool, for one thread at a time."""

    def __init__(self, kv_pool: KVPool, most_blocks: int, streams: DeviceStreams | None = None) -> None:
        """Read at most so many blocks at once. `streams` of the pool's device; None: it is in main memory."""
        self.most_blocks = most_blocks
        self.num_blocks = kv_pool.num_blocks
        self._pool = kv_pool.blocks
        self._side = None if streams is None else (streams.side_stream(), streams.event())
        sizes = (most_blocks, *kv_pool.shape.sizes)
        self._copied = torch.empty(sizes, dtype=kv_pool.shape.dtype, pin_memory=kv_pool.device.type == "cuda")
        self._bytes = as_bytes(self._copied)

    def read(self, block_ids: Sequence[int]) -> memoryview:
        """Content of blocks, one after the other; valid until the next call."""
        if self._side is not None:
            self._copy_from_device(*self._side, block_ids)
        else:  # torch would copy with threads of its own, beside those of the steps
            pool = as_bytes(self._pool)
            for place, block in enumerate(block_ids):
                self._bytes[place] = pool[block]
        return self._bytes[: len(block_ids)].reshape(-1).data

    def _copy_from_device(self, side: SideStream, done: DeviceEvent, block_ids: Sequence[int]) -> None:
        pairs = torch.from_numpy(np.stack([np.asarray(block_ids, dtype=np.int64), np.arange(len(block_ids))], axis=1))
        with torch.inference_mode(), side.current():
            swap_blocks(self._pool, self._copied, pairs)
            done.record()
        done.synchronize()
