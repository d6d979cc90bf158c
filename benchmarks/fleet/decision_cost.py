"""CPU time of the decisions whose cost grows with the number of shards, on the machine that runs this: medians."""

import time
from collections.abc import Callable
from statistics import median

from benchmarks.paper.jobs import Row
from quire.shard_router import ShardRouter
from quire.shards import Shard
from quire.v1 import cluster_pb2 as pb
from scheduler_svc.leadership.shard_choice import ShardView, next_roles, shard_in_need

_TIMES = 200
_WORKERS_EACH = 3
_PROMPT = [7] * 161


def decisions_row(num_shards: int) -> Row:
    """Time the choice of a request's shard, of what a scheduler leads, and of where a worker moves."""
    router = ShardRouter()
    router.record_shards(
        [
            Shard(number=each, leader=f"s{each}", epoch=1, num_workers=_WORKERS_EACH, num_running=300)
            for each in range(num_shards)
        ]
    )
    views = [ShardView(number=each, leader=f"s{each}", standbys=(), is_in_need=False) for each in range(num_shards)]
    shards = [pb.Shard(number=each, leader=f"s{each}", num_workers=_WORKERS_EACH) for each in range(num_shards)]
    return {
        "num_shards": num_shards,
        "host": {
            "choose_shard_us": _median_us(lambda: router.choose_shard(_PROMPT, salt=None, tenant=None)),
            "next_roles_us": _median_us(lambda: next_roles(views, "s0", (), (0,))),
            "shard_in_need_us": _median_us(lambda: shard_in_need(shards, 0)),
        },
    }


def _median_us(decide: Callable[[], object]) -> float:
    times_ns = []
    for _ in range(_TIMES):
        began_ns = time.thread_time_ns()
        decide()
        times_ns.append(time.thread_time_ns() - began_ns)
    return round(median(times_ns) / 1e3, 1)
