"""Shards of a deployment as its clients see them: which one a request belongs to, and which one takes a new request.

Pure. An id that the SDK makes names its shard; for any other id it follows from the id and the number of shards, so
that every client finds the request.
"""

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

# A shard that knows the prefix takes a request while it has at most so many times another's requests, and some more.
_BUSIER = 2
_MORE = 4

_MADE_ID = re.compile(r"(?:^|-)s(\d{1,3})-[0-9a-f]{32}(?:-|$)")  # others may stand before and behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One shard, as its leader described it lately."""

    number: int
    leader: str = ""  # address; empty: none at the moment
    epoch: int = 0  # of the leader
    num_workers: int = 0
    num_running: int = 0
    num_waiting: int = 0


def new_request_id(shard: int | None, prefix: str = "") -> str:
    """A new id behind a prefix. `shard`: the number of the shard to name in it; None: it names none."""
    made = uuid.uuid4().hex
    return f"{prefix}{made}" if shard is None else f"{prefix}s{shard}-{made}"


def shard_of_id(request_id: str, num_shards: int) -> int:
    """Number of the shard that a request with this id belongs to."""
    if num_shards == 1:
        return 0
    named = _MADE_ID.search(request_id)
    if named is not None and int(named[1]) < num_shards:
        return int(named[1])
    # The greatest hash wins: one shard more takes its part of the ids, and moves no other.
    return max(range(num_shards), key=lambda shard: blake2b(f"{shard}/{request_id}".encode(), digest_size=8).digest())


def names_its_shard(request_id: str) -> bool:
    """True if the SDK made this id for a shard."""
    return _MADE_ID.search(request_id) is not None


def shard_of_new_request(shards: Sequence[Shard], num_sent: Sequence[int], knows_prefix: int | None = None) -> int:
    """Number of the shard that takes a new request.

    The shard that knows the beginning of its prompt, unless that one is much busier than another; else the one with the
    fewest requests for each of its workers.

    Args:
        shards: every shard of the deployment, by number.
        num_sent: requests that were sent to each shard since it was described.
        knows_prefix: the shard that got the longest beginning of the prompt before; None: there is none.
    """
    serving = [shard for shard in shards if shard.leader and shard.num_workers]
    candidates = serving or [shard for shard in shards if shard.leader] or list(shards)

    def load(shard: Shard) -> float:
        num_live = shard.num_running + shard.num_waiting + num_sent[shard.number]
        return num_live / max(1, shard.num_workers)

    best = min(candidates, key=lambda shard: (load(shard), num_sent[shard.number]))
    known = next((shard for shard in candidates if shard.number == knows_prefix), None)
    if known is not None and load(known) <= _BUSIER * load(best) + _MORE:
        return known.number
    return best.number
