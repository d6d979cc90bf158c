"""Connects ranks on GPUs by NCCL. Only builds of torch for CUDA have it: callers import this where they need it."""

import datetime
import os
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupNCCL

from worker_svc.ranks.nccl_ranks import NcclRanks
from worker_svc.ranks.rank_store import RankStore
from worker_svc.steps.streams import DeviceEvent

# A group is watched by rank 0 and ends as one, so torch need not end processes by itself; nor may it have the host wait
# for a collective.
_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}


def connect_nccl(store: RankStore, rank: int, size: int, device: torch.device, *, timeout_s: float) -> NcclRanks:
    """Connect to all ranks, which must do so at the same time. Raises RuntimeError.

    Everything is set up here: graphs that are captured later only use it.
    """
    os.environ.update(_ENVIRONMENT)
    options = ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=timeout_s)
    group: Any = ProcessGroupNCCL(store.store, rank, size, options)
    group.eager_connect_single_device(device)
    ranks = NcclRanks(group, rank, size)
    ranks.warm_up(device)
    exchanged = DeviceEvent(device)
    exchanged.record()
    exchanged.synchronize()
    return ranks
