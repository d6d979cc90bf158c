"""Answers of several shards as one answer of the deployment. Pure."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeVar

from quire.errors import FieldViolation, InvalidRequestError, UnavailableError
from quire.request_list import RequestPage
from quire.results import PinnedPrefix
from quire.shards import Shard, led_shards
from quire.stats import Distributions, EndCounts, Histogram, JournalStats, LatencyStats, Stats, WorkTotals

Counts = TypeVar("Counts", WorkTotals, EndCounts)


def shard_of_stats(stats: Stats, leader: str) -> Shard:
    """The only shard of a deployment, by the statistics of its leader."""
    return Shard(
        number=0,
        leader=leader,
        epoch=stats.epoch,
        num_workers=sum(not worker.draining and not worker.out_of_service for worker in stats.workers),
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
    )


def merged_stats(parts: Sequence[Stats]) -> Stats:
    """The figures of all shards together. Latencies and the write time are those of the slowest shard."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    return Stats(
        workers=tuple(worker for part in parts for worker in part.workers),
        num_waiting=sum(part.num_waiting for part in parts),
        num_running=sum(part.num_running for part in parts),
        num_paused=sum(part.num_paused for part in parts),
        num_admitted=sum(part.num_admitted for part in parts),
        num_finished=sum(part.num_finished for part in parts),
        num_refused=sum(part.num_refused for part in parts),
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        output_tokens=sum(part.output_tokens for part in parts),
        uptime_s=max(part.uptime_s for part in parts),
        epoch=max(part.epoch for part in parts),
        journal=JournalStats(
            store=first.journal.store,
            entries=sum(part.journal.entries for part in parts),
            pending=sum(part.journal.pending for part in parts),
            write_s=max(part.journal.write_s for part in parts),
            degraded=any(part.journal.degraded for part in parts),
            delivery=_weakest_delivery([part.journal.delivery for part in parts]),
        ),
        latency=_slowest([part.latency for part in parts]),
        model_name=next((part.model_name for part in parts if part.model_name), ""),
        num_swapped=sum(part.num_swapped for part in parts),
        work=_sum(WorkTotals, [part.work for part in parts]),
        ends=_sum(EndCounts, [part.ends for part in parts]),
        distributions=_together([part.distributions for part in parts]),
        prefix_cache=all(part.prefix_cache for part in parts),
    )


def merged_prefixes(prefixes: Sequence[PinnedPrefix]) -> tuple[PinnedPrefix, ...]:
    """The pinned prefixes of one tenant in all shards, each once, by name, with the workers of all shards."""
    known: dict[str, PinnedPrefix] = {}
    for each in prefixes:
        before = known.get(each.name, each)
        known[each.name] = replace(before, worker_ids=tuple(sorted({*before.worker_ids, *each.worker_ids})))
    return tuple(known[name] for name in sorted(known))


def shard_of_page(page_token: str | None, shards: Sequence[Shard]) -> tuple[int, str | None]:
    """The shard that a page comes from, and the token for it there: the listing goes from shard to shard that is led.

    Raises InvalidRequestError for a token that no page of these shards had, UnavailableError for one of a shard that
    has lost its leader.
    """
    led = _led_numbers(shards)
    if page_token is None or len(shards) == 1:
        return led[0], page_token
    number, _, token = page_token.partition(":")
    shard = next((each.number for each in shards if str(each.number) == number), None)
    if shard is None:
        raise InvalidRequestError.of([FieldViolation("page_token", "no page of this deployment had it")])
    if shard not in led:
        raise UnavailableError(f"shard {shard}, from which the page comes, has no leader at the moment: ask again")
    return shard, token or None


def token_of_shard(shard: int, shards: Sequence[Shard]) -> str | None:
    """The token for the first page of a shard; None: there is one shard, and it is the first page of all."""
    return None if len(shards) == 1 else f"{shard}:"


def begins_shard(page_token: str) -> bool:
    """True if a page of several shards that has this token is the first one of its shard."""
    return page_token.endswith(":")


def page_of_shard(page: RequestPage, shard: int, shards: Sequence[Shard]) -> RequestPage:
    """The page with the token for the next one, of the same shard or of the next that is led."""
    if len(shards) == 1:
        return page
    if page.next_page_token is not None:
        return replace(page, next_page_token=f"{shard}:{page.next_page_token}")
    later = next((each for each in _led_numbers(shards) if each > shard), None)
    return replace(page, next_page_token=None if later is None else token_of_shard(later, shards))


def _led_numbers(shards: Sequence[Shard]) -> list[int]:
    return [shard.number for shard in led_shards(shards)]


def _sum(kind: type[Counts], parts: Sequence[Counts]) -> Counts:
    return kind(**{each.name: sum(getattr(part, each.name) for part in parts) for each in fields(kind)})


def _weakest_delivery(parts: Sequence[str]) -> str:
    return "relaxed" if "relaxed" in parts else parts[0]


def _slowest(parts: Sequence[LatencyStats]) -> LatencyStats:
    def most(name: str) -> float | None:
        return max((value for part in parts if (value := getattr(part, name)) is not None), default=None)

    return LatencyStats(
        num_requests=sum(part.num_requests for part in parts),
        first_token_p50_s=most("first_token_p50_s"),
        first_token_p99_s=most("first_token_p99_s"),
        token_p50_s=most("token_p50_s"),
        token_p99_s=most("token_p99_s"),
    )


def _together(parts: Sequence[Distributions]) -> Distributions:
    return Distributions(
        **{each.name: _histogram([getattr(part, each.name) for part in parts]) for each in fields(Distributions)}
    )


def _histogram(parts: Sequence[Histogram]) -> Histogram:
    """The sum of histograms; those of schedulers of another version, with other bounds, are left out."""
    bounds = max((part.bounds for part in parts), key=len)
    alike = [part for part in parts if part.bounds == bounds]
    counts = tuple(map(sum, zip(*(part.counts for part in alike), strict=True)))
    return Histogram(bounds=bounds, counts=counts, sum=sum(part.sum for part in alike))
