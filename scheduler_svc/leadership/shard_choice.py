"""Choices among the shards of a deployment: where a new worker serves, and which shard gives one to which. Pure.

Every leader decides by what all leaders have published lately, so two may see different numbers. The rules then still
end in an even spread: a shard gives one worker away at a time, and only to one that has at least two less. Many shards
give at once, each to another one, so that hundreds are even as soon as few are.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from quire.v1 import cluster_pb2 as pb

_MOST_COMPARED = 8  # shards of which a new worker gets the one with the fewest workers
_EVEN = 2  # workers that one shard must have more than another to give one away


def shard_of_new_worker(shards: Sequence[pb.Shard], worker_id: str, num_wanted: int | None = None) -> int:
    """Number of the shard with the fewest workers among those that are led, and below `num_wanted`. 0: none is.

    Of more than eight that are led, two are drawn by the worker's id. Hundreds of workers that start within half a
    second, while nothing is published, would all go to the few shards that have the fewest.
    """
    led = [shard for shard in shards[:num_wanted] if shard.leader]
    drawn = sorted(led, key=lambda shard: _turn(worker_id, shard.number))[
        : len(led) if len(led) <= _MOST_COMPARED else 2
    ]
    return min(drawn, key=lambda shard: shard.num_workers).number if drawn else 0


def shard_in_need(shards: Sequence[pb.Shard], giver: int, num_wanted: int | None = None) -> int | None:
    """Number of the shard that shall get a worker of the shard `giver`; None: that one gives none away.

    A removed shard, from `num_wanted` on, that has no requests gives all of its workers, to those with the fewest.
    Else the shard with most workers gives to the one with fewest, the second to the second, and so on, while it has at
    least two more. No shard gives and gets.
    """
    led = [shard for shard in shards if shard.leader]
    idle = [shard.number for shard in led if _is_done(shard, num_wanted)]
    poorest = sorted(
        (shard for shard in led if shard.number not in idle), key=lambda shard: (shard.num_workers, shard.number)
    )
    givers = [number for number in idle if shards[number].num_workers]
    if givers and poorest:
        return poorest[givers.index(giver) % len(poorest)].number if giver in givers else None
    richest = sorted(poorest, key=lambda shard: (-shard.num_workers, shard.number))
    for rich, poor in zip(richest, poorest, strict=True):
        if rich.num_workers - poor.num_workers < _EVEN:
            return None
        if rich.number == giver:
            return poor.number
    return None


def starving_shard(shards: Sequence[pb.Shard], giver: int, helped: Collection[int] = ()) -> int | None:
    """Number of a shard whose requests wait and that has no worker, where none has two: `giver` shall lend it its one.

    Of the shards that have a worker, the one with the fewest requests lends it, to the next in the circle of numbers:
    where most wait, some always wait again, and another shard would be left out for good. None: `giver` keeps it.

    A shard that a worker is on its way to gets no second one: where a shard says so, and those of `helped`, to which
    `giver` knows one to go or a new leader's own may still come.
    """
    led = [shard for shard in shards if shard.leader]
    awaiting = {*helped, *(number for shard in led for number in shard.gives_to)}
    starving = [shard for shard in led if not shard.num_workers and shard.num_waiting and shard.number not in awaiting]
    serving = [shard for shard in led if shard.num_workers]
    if not starving or not serving or any(shard.num_workers > 1 for shard in serving):
        return None
    lender = min(serving, key=lambda shard: (shard.num_running + shard.num_waiting, shard.number))
    if lender.number != giver:
        return None
    return min(starving, key=lambda shard: (shard.number - giver) % len(shards)).number


def _is_done(shard: pb.Shard, num_wanted: int | None) -> bool:
    """True of a removed shard that has no requests, and so needs no worker."""
    is_removed = num_wanted is not None and shard.number >= num_wanted
    return is_removed and not shard.num_running + shard.num_waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardView:
    """A shard as a scheduler sees it. `is_in_need`: nobody leads it for a while, or its leader is about to leave."""

    number: int
    leader: str  # address; empty: none
    standbys: tuple[str, ...]  # addresses
    is_in_need: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Changes that a scheduler makes to its shards, by number."""

    begin: list[int]  # to stand by for
    leave: list[int]  # that it stood by for
    hand_over: list[int]  # that it leads


def next_roles(views: Sequence[ShardView], me: str, standing: Collection[int], leading: Collection[int]) -> Roles:
    """Decide what this scheduler shall change now.

    A shard in need that nobody stands by for gets those that lead the fewest; each of them takes as many as make its
    share of all shards, so that those of a rack that failed go to many. Beside that, one that leads none, or at least
    two less than another, stands by for one shard, of such another one if there is any; and who leads two more than a
    standby of one of its shards hands that one over, one to each standby.

    Args:
        views: every shard, by number.
        me: address of this scheduler.
        standing: shards that it stands by for.
        leading: shards that it leads.
    """
    led = Counter(view.leader for view in views if view.leader not in ("", me))
    present = {*led, *(address for view in views for address in view.standbys if address != me)}
    leaving = {view.leader for view in views if view.is_in_need}
    has_fewest = all(len(leading) <= led[address] for address in present - leaving)
    ours = {*standing, *leading}
    needy = [
        view.number
        for view in views
        if view.is_in_need and has_fewest and view.number not in ours and not set(view.standbys) - {me}
    ]
    share = -(-len(views) // len({*(present - leaving), me}))
    begin = sorted(sorted(needy, key=lambda number: _turn(me, number))[: max(1, share - len(ours))])
    rich = {address for address, number in led.items() if number - len(leading) >= _EVEN}
    wants_one = not leading or bool(rich)
    if wants_one and not standing and not begin:
        ranked = sorted(
            (view for view in views if view.number not in ours),
            key=lambda view: (not view.is_in_need, -led[view.leader], len(view.standbys), _turn(me, view.number)),
        )
        begin = [view.number for view in ranked[:1]]
    idle = [
        number for number in sorted(standing) if views[number].leader not in ("", me) and not views[number].is_in_need
    ]
    wanted = [number for number in idle if wants_one and (not rich or views[number].leader in rich)]
    is_busy = len(standing) > len(idle)  # it is about to lead another one
    leave = [number for number in idle if is_busy or number not in wanted[:1]]
    return Roles(begin=begin, leave=leave, hand_over=_shards_to_hand_over(views, me, leading, led))


def _shards_to_hand_over(
    views: Sequence[ShardView], me: str, leading: Collection[int], led: "Counter[str]"
) -> list[int]:
    """Choose shards that go to schedulers which lead at least two less: one to each. `led`: shards that others lead."""
    chosen: list[int] = []
    served: set[str] = set()
    for number in sorted(leading):
        standbys = set(views[number].standbys) - {me}
        num_left = len(leading) - len(chosen)
        if not standbys & served and any(num_left - led[address] >= _EVEN for address in standbys):
            chosen.append(number)
            served |= standbys
    return chosen


def _turn(me: str, number: int) -> bytes:
    """An order of the shards that differs between schedulers, and workers, so that those that begin together part."""
    return blake2b(f"{me} {number}".encode(), digest_size=8).digest()
