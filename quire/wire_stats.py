"""Decodes a snapshot of the scheduler from protobuf."""

from quire.stats import (
    BlockStats,
    Distributions,
    EndCounts,
    Histogram,
    JournalStats,
    LatencyStats,
    Stats,
    WorkerStats,
    WorkTotals,
)
from quire.v1 import inference_pb2 as pb
from quire.wire_results import plain, seconds_or_none


def stats_from_pb(message: pb.GetStatsResponse) -> Stats:
    """Decodes a snapshot of the scheduler."""
    return plain(
        Stats,
        message,
        workers=tuple(_worker(each) for each in message.workers),
        uptime_s=message.uptime_ms / 1e3,
        journal=plain(JournalStats, message.journal, write_s=message.journal.write_ns / 1e9),
        latency=_latency(message.latency),
        work=plain(WorkTotals, message.work),
        ends=plain(EndCounts, message.ends),
        distributions=_distributions(message.distributions),
    )


def _distributions(message: pb.Distributions) -> Distributions:
    named = {name: getattr(message, name) for name in Distributions.__annotations__}
    return Distributions(
        **{
            name: Histogram(bounds=tuple(each.bounds), counts=tuple(each.counts), sum=each.sum)
            for name, each in named.items()
        }
    )


def _worker(message: pb.WorkerStats) -> WorkerStats:
    return plain(
        WorkerStats,
        message,
        blocks=plain(BlockStats, message.blocks),
        step_s=message.step_ns / 1e9,
        overhead_s=message.overhead_ns / 1e9,
        swap_blocks_per_s=message.swap_blocks_per_s or None,
        prefill_tokens_per_s=message.prefill_tokens_per_s or None,
        fetch_blocks_per_s=message.fetch_blocks_per_s or None,
    )


def _latency(message: pb.LatencyStats) -> LatencyStats:
    return LatencyStats(
        num_requests=message.num_requests,
        first_token_p50_s=seconds_or_none(message.first_token_p50_ns),
        first_token_p99_s=seconds_or_none(message.first_token_p99_ns),
        token_p50_s=seconds_or_none(message.token_p50_ns),
        token_p99_s=seconds_or_none(message.token_p99_ns),
    )
