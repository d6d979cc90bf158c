"""Accounts of records: whose record leaves when there is no room, and what is known of those that left."""

import pickle

from scheduler_svc.journal.record_ledger import RecordLedger
from scheduler_svc.journal.store import RECORD_OVERHEAD, Record

PLENTY = 1 << 40


def record(request_id: str, tenant: str, ended_unix_ns: int, weight: int) -> Record:
    return Record(request_id, tenant, ended_unix_ns, bytes(weight - RECORD_OVERHEAD - 2 * len(request_id)))


def add(ledger: RecordLedger, each: Record, *, all_bytes: int = PLENTY, tenant_bytes: int = PLENTY) -> list[str]:
    return ledger.add(each, all_bytes, tenant_bytes)


def test_a_tenant_drops_its_first_ended_records_down_to_its_last_one() -> None:
    ledger = RecordLedger()
    assert add(ledger, record("b", "one", 2, 400), tenant_bytes=800) == []
    assert add(ledger, record("a", "one", 1, 400), tenant_bytes=800) == []
    assert add(ledger, record("c", "one", 3, 300), tenant_bytes=800) == ["a"]
    assert add(ledger, record("d", "one", 4, 900), tenant_bytes=800) == ["b", "c"]
    assert add(ledger, record("e", "one", 5, 900), tenant_bytes=800) == ["d"]


def test_without_room_for_all_the_tenant_with_the_most_bytes_drops() -> None:
    ledger = RecordLedger()
    for number, tenant in enumerate(["one", "two", "two"]):
        add(ledger, record(f"{number}", tenant, number, 400))
    assert add(ledger, record("3", "one", 3, 300), all_bytes=1500) == []
    assert add(ledger, record("4", "three", 4, 400), all_bytes=1500) == ["1"]
    assert add(ledger, record("5", "one", 5, 300), all_bytes=1500) == ["0"]
    assert add(ledger, record("6", "one", 6, 2000), all_bytes=1500) == ["3", "5", "6"]
    assert add(ledger, record("7", "one", 7, 2000), all_bytes=500) == ["7", "4"]
    assert add(ledger, record("8", "one", 8, 2000), all_bytes=300) == ["8"]
    assert ledger.dropped_until == {"two": 1, "three": 4, "one": 8}


def test_a_tenant_that_has_less_than_it_had_is_measured_by_what_it_has() -> None:
    ledger = RecordLedger()
    add(ledger, record("a1", "a", 1, 300))
    add(ledger, record("a2", "a", 5, 450))
    add(ledger, record("b1", "b", 3, 400))
    add(ledger, record("g1", "gone", 1, 900))
    ledger.expire(1)
    assert add(ledger, record("c1", "c", 6, 300), all_bytes=1000) == ["a2"]


def test_a_record_put_again_is_of_its_new_size_and_end() -> None:
    ledger = RecordLedger()
    add(ledger, record("a", "one", 1, 700))
    add(ledger, record("b", "one", 2, 300))
    assert add(ledger, record("a", "one", 3, 400), tenant_bytes=700) == []
    assert add(ledger, record("c", "one", 4, 300), tenant_bytes=700) == ["b"]


def test_records_expire_with_what_is_known_of_those_that_were_dropped() -> None:
    ledger = RecordLedger()
    for number, tenant in enumerate(["one", "one", "two", "two"], start=1):
        add(ledger, record(f"{number}", tenant, number, 300), tenant_bytes=300)
    assert ledger.dropped_until == {"one": 1, "two": 3}
    ledger.expire(0)
    assert ledger.dropped_until == {"one": 1, "two": 3}
    ledger.expire(1)
    assert ledger.dropped_until == {"two": 3}
    ledger.expire(2)  # the record of tenant "one"
    assert add(ledger, record("5", "one", 5, 300), tenant_bytes=300) == []
    ledger.expire(3)
    assert ledger.dropped_until == {}


def test_a_late_record_that_is_dropped_makes_the_latest_end_of_its_tenant_no_earlier() -> None:
    ledger = RecordLedger()
    for number in (5, 6, 2):
        add(ledger, record(f"{number}", "one", number, 300), tenant_bytes=300)
    assert ledger.dropped_until == {"one": 5}


def test_accounts_stay_small_and_right_where_a_record_is_put_again_for_ever() -> None:
    ledger = RecordLedger()
    for request_id, tenant, weight in (("a1", "small", 300), ("b1", "large", 900)):
        add(ledger, record(request_id, tenant, 1, weight))
    before = len(pickle.dumps(ledger))
    for _ in range(2500):
        add(ledger, record("a2", "small", 2, 300))
    assert len(pickle.dumps(ledger)) < before + 20_000
    assert add(ledger, record("a2", "small", 2, 300), all_bytes=1499) == ["b1"]
