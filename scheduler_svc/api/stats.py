"""Answer of GetStats: requests that run and wait, and the use of memory."""

import time

from quire.v1 import inference_pb2 as pb
from scheduler_svc.core.scheduler_stats import TotalCounters, WorkerCounters
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.publisher import Delivery
from scheduler_svc.workers.member import Member
from scheduler_svc.workers.workers import Workers


class StatsReporter:
    """Reads the counters of all parts, and changes nothing."""

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        workers: Workers,
        *,
        store_kind: str,
        delivery: Delivery = "durable",
        prefix_cache: bool = True,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._workers = workers
        self._store_kind = store_kind
        self._delivery = delivery
        self._prefix_cache = prefix_cache
        self._started_ns = time.monotonic_ns()

    def __call__(self) -> pb.GetStatsResponse:
        """Build the answer."""
        engine, journal = self._engine, self._engine.journal.stats
        scheduler = engine.scheduler.stats()
        return pb.GetStatsResponse(
            workers=[
                *(_worker_stats(self._workers.members[each.worker_id], each) for each in scheduler.workers),
                *(
                    pb.WorkerStats(worker_id=each.worker_id, address=each.address, out_of_service=each.out_of_service)
                    for each in self._workers.members.values()
                    if each.out_of_service and each.loop is None
                ),
            ],
            num_waiting=scheduler.num_waiting_groups + self._admission.recovery.num_unserved,
            num_paused=scheduler.num_paused_groups + self._admission.recovery.num_paused,
            num_running=sum(each.num_running_groups for each in scheduler.workers),
            num_admitted=engine.num_admitted,
            num_finished=engine.num_finished,
            num_refused=self._admission.num_refused,
            prompt_tokens=engine.prompt_tokens,
            output_tokens=engine.output_tokens,
            uptime_ms=(time.monotonic_ns() - self._started_ns) // 1_000_000,
            epoch=journal.epoch,
            journal=pb.JournalStats(
                store=self._store_kind,
                entries=journal.entries,
                pending=journal.pending,
                write_ns=int(journal.write_ns),
                degraded=journal.degraded,
                delivery=self._delivery,
            ),
            latency=pb.LatencyStats(**engine.latency.summary(time.monotonic())._asdict()),
            model_name=self._admission.model.name if self._admission.model is not None else "",
            num_swapped=scheduler.num_swapped_groups,
            work=_work_totals(scheduler.work),
            ends=pb.EndCounts(**vars(engine.ends)),
            distributions=_distributions(engine),
            prefix_cache=self._prefix_cache,
        )


def _work_totals(work: TotalCounters) -> pb.WorkTotals:
    return pb.WorkTotals(
        num_preemptions=work.num_preemptions,
        num_swaps=work.num_swaps,
        recomputed_tokens=work.num_recomputed_tokens,
        swapped_out_blocks=work.num_swapped_out_blocks,
        swapped_in_blocks=work.num_swapped_in_blocks,
        fetched_blocks=work.num_fetched_blocks,
        copied_blocks=work.num_copied_blocks,
        prefix_query_tokens=work.num_prefix_query_tokens,
        prefix_hit_tokens=work.num_prefix_hit_tokens,
    )


def _distributions(engine: Engine) -> pb.Distributions:
    known = {**vars(engine.distributions), "journal_write_s": engine.journal.write_s}
    return pb.Distributions(
        **{name: pb.Histogram(bounds=each.bounds, counts=each.counts, sum=each.sum) for name, each in known.items()}
    )


def _worker_stats(member: Member, stats: WorkerCounters) -> pb.WorkerStats:
    message = pb.WorkerStats(
        worker_id=member.worker_id,
        address=member.address,
        num_running=stats.num_running,
        blocks=_block_stats(member.block_size, stats),
        num_preemptions=stats.num_preemptions,
        recomputed_tokens=stats.num_recomputed_tokens,
        host_blocks=stats.num_host_blocks,
        used_host_blocks=stats.num_used_host_blocks,
        num_swaps=stats.num_swaps,
        swapped_out_blocks=stats.num_swapped_out_blocks,
        swapped_in_blocks=stats.num_swapped_in_blocks,
        fetched_blocks=stats.num_fetched_blocks,
        copied_blocks=stats.num_copied_blocks,
        draining=stats.is_draining,
    )
    if member.loop is not None:
        times, costs = member.loop.times, member.loop.costs
        message.num_steps = times.num_steps
        message.step_ns = int(times.exec_ns)
        message.overhead_ns = int(times.overhead_ns)
        message.swap_blocks_per_s = costs.swap.per_s or 0.0
        message.fetch_blocks_per_s = costs.fetch.per_s or 0.0
        message.prefill_tokens_per_s = costs.prefill.per_s or 0.0
    return message


def _block_stats(block_size: int, stats: WorkerCounters) -> pb.BlockStats:
    return pb.BlockStats(
        total=stats.num_blocks,
        used=stats.num_used_blocks,
        cached=stats.num_cached_blocks,
        free=stats.num_free_blocks,
        block_size=block_size,
        filled_slots=stats.num_filled_token_slots,
        fragmented_slots=stats.num_fragmented_token_slots,
        prefix_query_tokens=stats.num_prefix_query_tokens,
        prefix_hit_tokens=stats.num_prefix_hit_tokens,
        reserved_slots=stats.num_reserved_token_slots,
        pinned=stats.num_pinned_blocks,
        shared=stats.num_shared_blocks,
        sequence_blocks=stats.num_sequence_blocks,
        saved=stats.num_saved_blocks,
    )
