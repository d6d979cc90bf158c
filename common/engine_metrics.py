"""Figures of a deployment for Prometheus, from one snapshot of its scheduler: vLLM's names, and our own beside them.

Our own say what vLLM's do not: blocks by state and worker, waste and sharing, preemptions by kind, the overhead of
steps, and the journal.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from common.metric_families import Labelled, counters, gauges, histogram
from common.vllm_metrics import vllm_histograms, vllm_numbers
from quire.stats import Stats, WorkerStats

_OF_WORKERS: tuple[tuple[str, str, Callable[[WorkerStats], float]], ...] = (
    ("kv_pinned_blocks", "Used KV blocks that pinned prefixes hold.", lambda worker: worker.blocks.pinned),
    ("kv_shared_blocks", "Used KV blocks with more than one holder.", lambda worker: worker.blocks.shared),
    ("host_blocks", "Blocks of the host pool.", lambda worker: worker.host_blocks),
    ("used_host_blocks", "Used blocks of the host pool.", lambda worker: worker.used_host_blocks),
    ("running_sequences", "Sequences that run on the worker.", lambda worker: worker.num_running),
    ("worker_in_service", "1 while the worker gets new requests.", lambda worker: _is_in_service(worker)),
)


def engine_numbers(stats: Stats) -> Iterator[Metric]:
    """Gauges and counters; `quire_…` without the label of a worker are of the whole deployment."""
    yield from vllm_numbers(stats)
    yield from _requests(stats)
    yield from _memory(stats)
    yield from _journal(stats)
    yield from _workers(stats.workers)


def engine_histograms(stats: Stats) -> Iterator[Metric]:
    """Histograms, which are most of the text."""
    yield from vllm_histograms(stats)
    seen = stats.distributions
    for name, about, values in (
        ("step_seconds", "Seconds that a worker executed a step.", seen.step_s),
        ("step_overhead_seconds", "Seconds of an iteration without execution.", seen.step_overhead_s),
        ("journal_write_seconds", "Seconds from a journal entry to its acknowledgement.", seen.journal_write_s),
    ):
        yield histogram(f"quire_{name}", about, {}, values)


def _requests(stats: Stats) -> Iterator[Metric]:
    yield gauges("quire_requests_paused", "Requests that are paused.", _one(stats.num_paused))
    yield counters("quire_requests_admitted", "Requests accepted, or taken over.", _one(stats.num_admitted))
    yield counters("quire_requests_refused", "Requests refused.", _one(stats.num_refused))


def _memory(stats: Stats) -> Iterator[Metric]:
    work, blocks = stats.work, stats.blocks
    yield gauges("quire_kv_waste_ratio", "Part of the used KV blocks' slots without a token.", _one(blocks.waste or 0))
    yield gauges("quire_kv_sharing_ratio", "Part of the KV blocks that sharing saves.", _one(blocks.saving or 0))
    preemptions = {"swap": work.num_swaps, "recompute": work.num_preemptions - work.num_swaps}
    yield counters("quire_preemptions", "Preemptions by what happened to the KV.", _by("kind", preemptions))
    yield counters("quire_recomputed_tokens", "Tokens computed again.", _one(work.recomputed_tokens))
    swapped = {"out": work.swapped_out_blocks, "in": work.swapped_in_blocks}
    yield counters("quire_swapped_blocks", "Blocks moved to host pools and back.", _by("direction", swapped))
    yield counters("quire_fetched_blocks", "Blocks read from other workers.", _one(work.fetched_blocks))
    yield counters("quire_copied_blocks", "Shared blocks copied before a write.", _one(work.copied_blocks))


def _journal(stats: Stats) -> Iterator[Metric]:
    journal = stats.journal
    yield counters("quire_journal_entries", "Journal entries written.", _one(journal.entries))
    yield gauges("quire_journal_pending_records", "Records that are not yet durable.", _one(journal.pending))
    yield gauges("quire_journal_degraded", "1 while the journal's store does not answer.", _one(journal.degraded))
    yield gauges("quire_uptime_seconds", "Seconds for which the scheduler has led.", _one(stats.uptime_s))


def _workers(workers: Sequence[WorkerStats]) -> Iterator[Metric]:
    states = [
        ({"worker": each.worker_id, "state": state}, float(getattr(each.blocks, state)))
        for each in workers
        for state in ("used", "cached", "free")
    ]
    yield gauges("quire_kv_blocks", "KV blocks by state; together they are the pool.", states)
    for name, about, value in _OF_WORKERS:
        yield gauges(f"quire_{name}", about, [({"worker": each.worker_id}, value(each)) for each in workers])


def _is_in_service(worker: WorkerStats) -> bool:
    return not worker.draining and not worker.out_of_service


def _one(value: float) -> Labelled:
    return [({}, value)]


def _by(label: str, values: Mapping[str, float]) -> Labelled:
    return [({label: name}, value) for name, value in values.items()]
