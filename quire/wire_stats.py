"""Decodes the scheduler's statistics from protobuf into plain data."""

from quire.stats import BlockStats, JournalStats, LatencyStats, Stats, WorkerStats
from quire.v1 import inference_pb2 as pb


def stats_from_pb(message: pb.GetStatsResponse) -> Stats:
    """Decodes a snapshot of the scheduler."""
    return Stats(
        workers=tuple(_worker(each) for each in message.workers),
        num_waiting=message.num_waiting,
        num_running=message.num_running,
        num_paused=message.num_paused,
        num_admitted=message.num_admitted,
        num_finished=message.num_finished,
        num_refused=message.num_refused,
        prompt_tokens=message.prompt_tokens,
        output_tokens=message.output_tokens,
        uptime_s=message.uptime_ms / 1e3,
        epoch=message.epoch,
        journal=_journal(message.journal),
        latency=_latency(message.latency),
    )


def _worker(message: pb.WorkerStats) -> WorkerStats:
    return WorkerStats(
        worker_id=message.worker_id,
        address=message.address,
        num_running=message.num_running,
        blocks=_blocks(message.blocks),
        num_steps=message.num_steps,
        step_s=message.step_ns / 1e9,
        overhead_s=message.overhead_ns / 1e9,
        num_preemptions=message.num_preemptions,
        num_swaps=message.num_swaps,
        recomputed_tokens=message.recomputed_tokens,
        host_blocks=message.host_blocks,
        used_host_blocks=message.used_host_blocks,
        swapped_out_blocks=message.swapped_out_blocks,
        swapped_in_blocks=message.swapped_in_blocks,
        copied_blocks=message.copied_blocks,
        swap_blocks_per_s=message.swap_blocks_per_s or None,
        prefill_tokens_per_s=message.prefill_tokens_per_s or None,
        draining=message.draining,
        out_of_service=message.out_of_service,
    )


def _blocks(message: pb.BlockStats) -> BlockStats:
    return BlockStats(
        total=message.total,
        used=message.used,
        cached=message.cached,
        free=message.free,
        block_size=message.block_size,
        filled_slots=message.filled_slots,
        fragmented_slots=message.fragmented_slots,
        reserved_slots=message.reserved_slots,
        pinned=message.pinned,
        shared=message.shared,
        sequence_blocks=message.sequence_blocks,
        saved=message.saved,
        prefix_query_tokens=message.prefix_query_tokens,
        prefix_hit_tokens=message.prefix_hit_tokens,
    )


def _journal(message: pb.JournalStats) -> JournalStats:
    return JournalStats(
        store=message.store,
        entries=message.entries,
        pending=message.pending,
        write_s=message.write_ns / 1e9,
        degraded=message.degraded,
    )


def _latency(message: pb.LatencyStats) -> LatencyStats:
    return LatencyStats(
        num_requests=message.num_requests,
        first_token_p50_s=message.first_token_p50_ns / 1e9 or None,
        first_token_p99_s=message.first_token_p99_ns / 1e9 or None,
        token_p50_s=message.token_p50_ns / 1e9 or None,
        token_p99_s=message.token_p99_ns / 1e9 or None,
    )
