"""Shards of a deployment as its clients see them: which one a request belongs to, and which one takes a new request.

Pure. An id that the SDK makes names its shard; for any other id it follows from the id and the number of shards, so
that every client finds the request. Where that number has changed, a request may be in the shard that followed from an
earlier one.
"""

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

MOST_SHARDS = 999  # of a deployment

# A shard that knows the prefix, or is the session's, takes a request while it has at most so many times another's load,
# and some more.
_BUSIER = 2
_MORE = 4
_TOKENS_A_REQUEST = 512  # to be computed, that are as much load as a request
_BYTES_A_REQUEST = 4 * _TOKENS_A_REQUEST  # of a prompt

# Others may stand before and behind them.
_MADE_ID = re.compile(r"(?:^|[-_])s(\d{1,3})-[0-9a-f]{32}(?:-|$)")
_SURE_ID = re.compile(r"(?:^|-)s\d{1,3}-[0-9a-f]{32}(?:-|$)")  # behind `_`, requests were placed by the whole id once
_SESSION_ID = re.compile(r"(?:^|[-_])k([0-9a-f]{4})-[0-9a-f]{32}(?:-|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One shard, as its leader described it lately."""

    number: int
    leader: str = ""  # address; empty: none at the moment
    epoch: int = 0  # of the leader
    num_workers: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_uncomputed_tokens: int = 0  # of those that run or wait
    takes_requests: bool = True  # new ones; False: it is being added, or was removed and finishes what it has


def led_shards(shards: Sequence[Shard]) -> Sequence[Shard]:
    """Shards that have a leader; all of them if none has."""
    return [shard for shard in shards if shard.leader] or shards


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardNumbers:
    """Numbers of shards of a deployment. The shards below `num_shards` take new requests."""

    version: int = 0  # grows with every change; 0: there will be none
    num_shards: int = 1
    num_kept: int = 1  # with those that are being added or removed
    former: tuple[int, ...] = ()  # earlier values of num_shards by which requests may have been placed, the last first

    @property
    def are_settled(self) -> bool:
        """True if every request is where its id says."""
        return not self.former and self.num_kept == self.num_shards


def new_request_id(shard: int | None, prefix: str = "", *, session: int | None = None) -> str:
    """A new id behind a prefix.

    Args:
        shard: number of the shard to name in it; None: it names none.
        prefix: of the id.
        session: `session_number` to name where no shard is named, so that the id belongs to the session's shard.
    """
    made = uuid.uuid4().hex
    if shard is not None:
        return f"{prefix}s{shard}-{made}"
    return f"{prefix}{made}" if session is None else f"{prefix}k{session:04x}-{made}"


def session_number(session_key: str, tenant: str | None) -> int:
    """Number below 65,536 that stands for a session key of a tenant wherever a shard is chosen by it."""
    data = f"{tenant or ''}\0{session_key}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=2).digest())


def shard_of_id(request_id: str, num_shards: int) -> int:
    """Number of the shard that a request with this id belongs to."""
    if num_shards == 1:
        return 0
    named = _MADE_ID.search(request_id)
    if named is not None and int(named[1]) < num_shards:
        return int(named[1])
    session = _SESSION_ID.search(request_id)
    name = request_id if session is None else _name_of_session(int(session[1], 16))
    return max(range(num_shards), key=lambda shard: _claim(shard, name))


def places_of_id(request_id: str, numbers: ShardNumbers) -> list[int]:
    """Shards that may have a request with this id: the one that takes it if none has, then those of earlier numbers."""
    homes = [shard_of_id(request_id, count) for count in (numbers.num_shards, *numbers.former)]
    return [shard for shard in dict.fromkeys(homes) if shard < numbers.num_kept]


def names_its_shard(request_id: str) -> bool:
    """True if the SDK made this id for a shard, and no version of it has placed such an id elsewhere."""
    return _SURE_ID.search(request_id) is not None


def load_of_request(num_bytes: int, num_known_bytes: int = 0) -> float:
    """Load that a request adds to a shard that knows so much of its prompt, in requests without a prompt."""
    return 1 + (num_bytes - num_known_bytes) / _BYTES_A_REQUEST


def loads_of(shards: Sequence[Shard], sent: Sequence[float]) -> dict[int, float]:
    """Load of each shard that may take new requests, by number, in the order of `shards`.

    These are the shards with a leader and workers; if there are none, those with a leader; else all.
    """
    serving = [shard for shard in shards if shard.leader and shard.num_workers]
    candidates = serving or [shard for shard in shards if shard.leader] or shards
    return {shard.number: load_of_shard(shard, sent[shard.number]) for shard in candidates}


def load_of_shard(shard: Shard, sent: float) -> float:
    """Load of each worker of a shard, in requests, to which so much was sent since it was described."""
    num_live = shard.num_running + shard.num_waiting + shard.num_uncomputed_tokens / _TOKENS_A_REQUEST
    num_workers = max(1, shard.num_workers)
    return num_live / num_workers + sent / num_workers


def shard_by_load(
    loads: Mapping[int, float],
    sent: Sequence[float],
    known_bytes: Mapping[int, int] | None = None,
    session: int | None = None,
) -> int:
    """Number of the shard that takes a new request.

    Of the shards that know a beginning of its prompt, the one that knows most of it and is not much busier than another
    for what that saves; else the one with the least load for each of its workers. A request of a session goes to the
    session's shard, or to the next in its order that is not much busier than another.

    Args:
        loads: `loads_of` the deployment's shards.
        sent: load that was sent to each shard since it was described, by number.
        known_bytes: bytes of the longest beginning of the prompt that a shard may have cached, by its number.
        session: `session_number` of the request; None: it belongs to no session.
    """
    least = min(loads.values())
    best = min((number for number, load in loads.items() if load == least), key=sent.__getitem__)
    known_bytes = known_bytes or {}
    most = _BUSIER * loads[best] + _MORE
    at_best = known_bytes.get(best, 0)

    def fits(number: int) -> bool:
        saved = max(0, known_bytes.get(number, 0) - at_best) / _BYTES_A_REQUEST
        return loads[number] <= most + saved

    if session is not None:
        name = _name_of_session(session)
        return max(filter(fits, loads), key=lambda number: _claim(number, name))  # `best` fits
    fitting = [
        (num_bytes, -loads[number], -number)
        for number, num_bytes in known_bytes.items()
        if number in loads and fits(number)
    ]
    return -max(fitting)[2] if fitting else best


def _claim(shard: int, name: str) -> bytes:
    """Claim of a shard to what has this name. The greatest wins: one shard more takes its part, and moves no other."""
    return blake2b(f"{shard}/{name}".encode(), digest_size=8).digest()


def _name_of_session(number: int) -> str:
    return f"session {number}"
