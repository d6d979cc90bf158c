"""Number of replicas that an entry waits for, by what a node says of them. Waiting itself: `test_cluster_store.py`."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from scheduler_svc.journal.redis_link import Packed, RedisLink, pack
from scheduler_svc.journal.replica_wait import LONGEST_LAG_S, ReplicaWait, num_replicas
from scheduler_svc.journal.store import StoreUnavailableError

replicas = st.lists(st.tuples(st.sampled_from(["online", "wait_bgsave", "send_bulk"]), st.integers(0, 60)), max_size=4)


def info(found: list[tuple[str, int]]) -> bytes:
    """A node's INFO replication."""
    lines = ["# Replication", "role:master", f"connected_slaves:{len(found)}"]
    lines += [
        f"slave{number}:ip=10.0.0.{number},port=7000,state={state},offset=42,lag={lag},type=replica"
        for number, (state, lag) in enumerate(found)
    ]
    return "\r\n".join([*lines, "master_replid:abc", ""]).encode()


@given(replicas, st.integers(0, 3))
def test_replicas_count_that_follow_and_were_heard_of(found: list[tuple[str, int]], wanted: int) -> None:
    there = sum(state == "online" and lag <= LONGEST_LAG_S for state, lag in found)
    assert num_replicas(info(found)) == there
    wait = ReplicaWait(wanted, 0.5)
    wait.learn(info(found))
    assert wait.expected == min(wanted, there)
    waiting = wait.begin()
    assert waiting.expected == wait.expected
    assert waiting.commands == ([pack("WAIT", wait.expected, 500)] if wait.expected else [])


def test_nothing_is_sent_behind_an_entry_where_no_replica_is_wanted() -> None:
    assert ReplicaWait(0, 0.5).begin().commands == []


def test_a_replica_of_which_a_node_does_not_say_when_it_was_heard_of_counts() -> None:
    assert num_replicas(b"slave0:ip=10.0.0.1,port=7000,state=online,offset=42\r\n") == 1


INFO = pack("INFO", "replication")


class OneNode(RedisLink):
    """Link to a node that has these replicas, of which so many answer for the last write; `leads`: others say so."""

    def __init__(self, *, there: int, with_it: int = 0, leads: bool = True) -> None:
        super().__init__("redis://10.0.0.1", timeout_s=1.0, repeatable=False)
        self.there, self.with_it, self.leads = there, with_it, leads
        self.num_confirmed = 0
        self.asked: list[Packed] = []  # not behind a write

    async def call(self, command: Packed, *, answer_bytes: int = 0) -> Any:
        self.asked.append(command)
        return info([("online", 0)] * self.there) if command == INFO else self.with_it

    async def confirm_owner(self) -> None:
        if not self.leads:
            raise StoreUnavailableError("another leads")
        self.num_confirmed += 1


def replies_of(node: OneNode, commands: Sequence[Packed]) -> list[Any]:
    """Replies to what is sent behind a write."""
    return [info([("online", 0)] * node.there) if each == INFO else node.with_it for each in commands]


async def write(wait: ReplicaWait, node: OneNode) -> list[Packed]:
    """Write to a node, and check; returns what was sent behind the write."""
    waiting = wait.begin()
    await wait.check(waiting, replies_of(node, waiting.commands), node)
    return waiting.commands


async def look_now(wait: ReplicaWait, node: OneNode) -> None:
    """Write after a write whose reply was lost."""
    wait.begin()
    await write(wait, node)


async def test_a_replica_that_is_back_must_have_the_write_that_was_sent_before_it_was_seen() -> None:
    wait, node = ReplicaWait(1, 0.5), OneNode(there=0)
    await write(wait, node)
    assert wait.expected == 0 and not wait.is_unconfirmed and node.num_confirmed == 1
    with pytest.raises(StoreUnavailableError, match="another leads"):
        await look_now(wait, OneNode(there=0, leads=False))
    assert wait.is_unconfirmed
    with pytest.raises(StoreUnavailableError, match="0 of 1 replicas"):
        await write(wait, OneNode(there=1))  # it was frozen, and counts a replica that leads by now
    wait.learn(info([]))
    back = OneNode(there=1, with_it=1)
    await write(wait, back)
    assert wait.expected == 1 and not wait.is_unconfirmed
    assert back.num_confirmed == 0  # the replica is one of its own


async def test_after_a_write_that_is_in_doubt_the_node_of_the_next_is_looked_at() -> None:
    wait, node = ReplicaWait(1, 0.5), OneNode(there=0)
    await write(wait, node)
    assert await write(wait, node) == []  # looked within the second
    wait.begin()  # its reply is lost
    assert await write(wait, node) == [INFO]
    assert await write(wait, node) == []
    assert node.num_confirmed == 2


async def test_replicas_that_have_not_answered_are_not_waited_for_again_if_there_are_no_more_than_were_known() -> None:
    wait, node = ReplicaWait(1, 0.5), OneNode(there=1)
    with pytest.raises(StoreUnavailableError, match="0 of 1 replicas"):
        await write(wait, node)
    assert node.asked == [INFO]


@pytest.mark.parametrize("logs_changes", [True, False])
def test_a_change_of_the_number_is_logged_once_if_it_is_to_be(logs_changes: bool) -> None:
    wait = ReplicaWait(2, 0.5, logs_changes=logs_changes)
    with capture_logs() as logs:
        for there in (2, 1, 1, 3, 3):
            wait.learn(info([("online", 0)] * there))
    changes = [("warning", 1), ("info", 2)]
    assert [(line["log_level"], line["replicas"]) for line in logs] == (changes if logs_changes else [])
