"""The scenario: workers 1 → 4, schedulers 1 → 3, then back, while streams are read. Knows no engine and no process."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import quire
from quire.shards import Shard
from tests.compose.engine import SmokeError, say
from tests.scaling.deployment import END_S, NUM_SHARDS, Deployment, End, Scaled
from tests.scaling.streams import Streams

MOST_WORKERS = 4
_POLL_S = 0.1
_CHANGE_S = 240.0  # for a change to be whole: a worker's container imports torch, on few cores beside the others


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the number of one service, and what the shards then have: leaders, and workers in all."""

    service: Scaled
    number: int
    num_leaders: int
    num_workers: int

    @property
    def words(self) -> str:
        return f"{self.service}s → {self.number}"


CHANGES = (
    Change("worker", MOST_WORKERS, 1, MOST_WORKERS),
    Change("scheduler", NUM_SHARDS, NUM_SHARDS, MOST_WORKERS),
    Change("scheduler", 1, 1, MOST_WORKERS),
    Change("worker", 1, 1, 1),
)


def run(deployment: Deployment) -> dict[str, Any]:
    """Play the scenario. Returns its figures; raises SmokeError, WrongStreamError or quire.QuireError."""
    try:
        deployment.start()
        figures = asyncio.run(_scale(deployment))
        return {"deployment": deployment.name, **figures, "ends": checked_ends(figures["ends"], deployment.end())}
    except Exception:
        say(deployment.describe())
        raise
    finally:
        deployment.close()


async def _scale(deployment: Deployment) -> dict[str, Any]:
    """Figures of all changes, made one after the other under load."""
    async with Streams.of(deployment.address, deployment.http_address) as streams:
        say(f"{deployment.name}: references made, {NUM_SHARDS} shards led by one scheduler, with one worker")
        ends: list[End] = []
        try:
            async with streams.running():
                steps = [await _step(streams, "as started", 1, 1)]
                steps += [await _change(deployment, streams, change, ends) for change in CHANGES]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # what went wrong first
        await streams.check_records()
        between, first = streams.pauses.longest_between(), streams.pauses.longest_to_first()
        say(
            f"{sum(streams.num_ended)} streams, {streams.num_tokens:,} tokens, all equal to the references; longest "
            f"pause between two tokens of a stream {between.length_s:.2f} s ({between.stream})"
        )
        return {
            "streams": sum(streams.num_ended),
            "tokens": streams.num_tokens,
            "longest_pause_s": round(between.length_s, 3),
            "longest_wait_for_first_token_s": round(first.length_s, 3),
            "steps": steps,
            "ends": ends,
        }


async def _change(deployment: Deployment, streams: Streams, change: Change, ends: list[End]) -> dict[str, Any]:
    """Make a change under load; wait until it is whole, and each reader has had a stream since."""
    began_s = time.monotonic()
    shards = await streams.client.shards()
    is_less = change.number < (
        len({shard.leader for shard in shards})
        if change.service == "scheduler"
        else sum(shard.num_workers for shard in shards)
    )
    if is_less:
        new = await asyncio.to_thread(deployment.remove, change.service, change.number)
        ends += new
        say(f"{change.words}: ended {_spelled(new)}")
    else:
        await asyncio.to_thread(deployment.add, change.service, change.number)
    return await _step(streams, change.words, change.num_leaders, change.num_workers, began_s)


async def _step(
    streams: Streams, words: str, num_leaders: int, num_workers: int, began_s: float | None = None
) -> dict[str, Any]:
    """Figures from the beginning of a change until it is whole, and every reader has had one more stream."""
    began_s = time.monotonic() if began_s is None else began_s
    shards = await _until(
        streams.client, words, lambda shards: _is_so(shards, num_leaders=num_leaders, num_workers=num_workers)
    )
    whole_s = time.monotonic() - began_s
    await streams.until_each_has_ended(1, _CHANGE_S)
    between, first = streams.pauses.longest_between(began_s), streams.pauses.longest_to_first(began_s)
    say(
        f"{words}: whole after {whole_s:.1f} s, workers by shard {[shard.num_workers for shard in shards]}; longest "
        f"pause {between.length_s:.2f} s ({between.stream}), longest wait for a first token {first.length_s:.2f} s"
    )
    return {
        "step": words,
        "whole_after_s": round(whole_s, 2),
        "workers_by_shard": [shard.num_workers for shard in shards],
        "longest_pause_s": round(between.length_s, 3),
        "longest_wait_for_first_token_s": round(first.length_s, 3),
    }


def _is_so(shards: Sequence[Shard], *, num_leaders: int, num_workers: int) -> bool:
    """True if so many schedulers lead all shards, with so many workers in all, spread over them as far as they go."""
    leaders = {shard.leader for shard in shards}
    numbers = [shard.num_workers for shard in shards]
    is_spread = min(numbers) > 0 or num_workers < len(shards)
    return "" not in leaders and len(leaders) == num_leaders and sum(numbers) == num_workers and is_spread


async def _until(client: quire.AsyncClient, words: str, is_so: Callable[[Sequence[Shard]], bool]) -> Sequence[Shard]:
    """Poll the shards until it is so. Raises SmokeError."""
    deadline_s = time.monotonic() + _CHANGE_S
    while not is_so(shards := await client.shards()):
        if time.monotonic() > deadline_s:
            raise SmokeError(f"not within {_CHANGE_S:.0f} s: {words}; shards: {shards}")
        await asyncio.sleep(_POLL_S)
    return shards


def checked_ends(ends: Sequence[End], last: Sequence[End]) -> list[dict[str, Any]]:
    """Make figures of all ends. Raises SmokeError if one was not clean, or took longer than its grace period."""
    say(f"stopped at the end: {_spelled(last)}")
    wrong = [each for each in (*ends, *last) if each.exit_code != 0 or each.time_s > END_S]
    if wrong:
        raise SmokeError(f"each must end with exit code 0 within {END_S:g} s of SIGTERM: {wrong}")
    return [{"name": each.name, "under_load": each in ends, "time_s": round(each.time_s, 2)} for each in (*ends, *last)]


def _spelled(ends: Sequence[End]) -> str:
    return ", ".join(f"{each.name} in {each.time_s:.1f} s with code {each.exit_code}" for each in ends)
