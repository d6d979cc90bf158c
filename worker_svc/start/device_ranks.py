"""Connects the ranks of a group that compute on CUDA devices.

The only file of the start that imports NCCL's group, and only if it is needed.
"""

import torch

from kernels.native.shared_ranks import RankReduction
from worker_svc.ranks.rank_store import RankStore


def connect_devices(store: RankStore, rank: int, size: int, device: torch.device, timeout_s: float) -> RankReduction:
    """Connect to all ranks, which must do so at the same time."""
    from worker_svc.ranks.nccl_group import connect_nccl  # noqa: PLC0415 - torch may be built without NCCL

    return connect_nccl(store, rank, size, device, timeout_s=timeout_s)
