"""Number of replicas that an entry waits for, by what a node says of them. Waiting itself: `test_cluster_store.py`."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.journal.redis_link import pack
from scheduler_svc.journal.replica_wait import LONGEST_LAG_S, ReplicaWait, num_replicas

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
