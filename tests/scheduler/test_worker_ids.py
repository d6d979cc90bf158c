"""Thousands of worker ids, one after another: the state kept of departed workers is bounded."""

import asyncio
import gc
import re
import time
from collections import deque
from types import FrameType, FunctionType, ModuleType

import pytest

from quire.errors import FailedPreconditionError, OverloadedError
from quire.v1 import cluster_pb2, worker_pb2
from scheduler_svc.workers.latest import MOST_KEPT, Latest
from scheduler_svc.workers.worker_link import WorkerLink
from scheduler_svc.workers.workers import LEASE_MS, MAX_WORKERS
from tests.scheduler.journal_setup import until
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.serving_site import Site, running_site

NUM_IDS = MOST_KEPT + 300  # of each kind
FEW = 64  # beyond what is kept


class HollowLink(WorkerLink):
    """A worker without a process, whose address is its id. It computes nothing."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.news = asyncio.Event()
        self.results = deque()
        self.broken = None
        self.is_damaged = self.is_unreadable = False

    async def describe(self, known_tokenizer_fingerprint: str) -> worker_pb2.DescribeResponse:
        return ScriptedWorker(self.address).description

    def open(self, step_key: str = "") -> None:
        """Do nothing: there is nothing to open."""

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def hang_up(self) -> None:
        self._break("it has gone")


def register(site: Site, worker_id: str, fingerprint: str = "counting-1") -> None:
    incarnation = ScriptedWorker(worker_id).description.incarnation
    site.workers.register(
        cluster_pb2.RegisterRequest(
            worker_id=worker_id, address=worker_id, incarnation=incarnation, model_fingerprint=fingerprint
        )
    )


async def passes(condition: object) -> None:
    """Waits by turns of the loop alone: nothing here needs time."""
    assert callable(condition)
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    await until(condition)


def ids_kept(*roots: object) -> set[str]:
    """Ids of workers that have gone, as far as they can be reached from there."""
    found: set[str] = set()
    seen: set[int] = set()
    left = list(roots)
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(
            each, type | ModuleType | FunctionType | FrameType | asyncio.AbstractEventLoop
        ):
            continue
        seen.add(id(each))
        if isinstance(each, str):
            if re.fullmatch(r"gone-\w+-\d+", each):
                found.add(each)
            continue
        left.extend(gc.get_referents(each))
        if isinstance(each, dict):
            left.extend(each)  # its keys, too, where they are strings
    return found


async def lost(site: Site, worker_id: str, *, is_drained: bool = False, is_at_fault: bool = False) -> None:
    """A worker that serves, and goes."""
    register(site, worker_id)
    member = site.workers.members[worker_id]
    await passes(lambda: member.loop is not None)
    if is_drained:
        site.workers.drain(worker_id, undo=False)
    if is_at_fault:
        site.engine.on_worker_at_fault(worker_id)
        await passes(lambda: member.task is None)
        site.workers.give_up_silent(time.monotonic() + LEASE_MS / 1000 + 1)
    else:
        assert isinstance(member.link, HollowLink)
        member.link.hang_up()
    await passes(lambda: worker_id not in site.workers.members)


async def refused(site: Site, worker_id: str) -> None:
    with pytest.raises(FailedPreconditionError):
        register(site, worker_id, "counting-2")


@pytest.mark.parametrize("kind", ["lost", "drained", "faulty", "refused"])
async def test_what_is_kept_of_workers_that_have_gone_is_bounded(kind: str) -> None:
    async with running_site(make_link=HollowLink, model_kept_s=3600.0) as site:
        await lost(site, "first")
        for number in range(NUM_IDS):
            worker_id = f"gone-{kind}-{number}"
            if kind == "refused":
                await refused(site, worker_id)
            else:
                await lost(site, worker_id, is_drained=kind == "drained", is_at_fault=kind == "faulty")
        del worker_id
        kept = ids_kept(
            site.workers.__dict__,
            site.engine.__dict__,
            site.admission.__dict__,
            site.keeper.__dict__,
            site.stats.__dict__,
        )
    assert len(kept) <= MOST_KEPT + FEW
    assert f"gone-{kind}-{NUM_IDS - 1}" in kept, "or this looks in the wrong place"
    assert f"gone-{kind}-0" not in kept


async def test_a_crowd_that_says_nothing_of_itself_keeps_no_worker_out() -> None:
    """Names that nobody stands behind took all places, ten seconds at a time."""
    num_dialling = 0

    class Silent(HollowLink):
        async def describe(self, known_tokenizer_fingerprint: str) -> worker_pb2.DescribeResponse:
            nonlocal num_dialling
            if self.address == "real":
                return await super().describe(known_tokenizer_fingerprint)
            num_dialling += 1
            try:
                await asyncio.Event().wait()
            finally:
                num_dialling -= 1
            raise AssertionError

    async with running_site(make_link=Silent) as site:
        for number in range(MAX_WORKERS):
            register(site, f"w{number}")
        await passes(lambda: num_dialling == MAX_WORKERS)
        register(site, "real")
        await passes(lambda: [each.worker_id for each in site.workers.driven] == ["real"])
        for number in range(MAX_WORKERS):
            register(site, f"x{number}")
        await passes(lambda: num_dialling == MAX_WORKERS - 1)
        assert len(site.workers.members) == MAX_WORKERS and site.workers.driven


async def test_no_more_workers_serve_at_once_than_one_scheduler_takes() -> None:
    async with running_site(make_link=HollowLink) as site:
        for number in range(MAX_WORKERS):
            register(site, f"w{number}")
        await until(lambda: len(site.workers.driven) == MAX_WORKERS)
        with pytest.raises(OverloadedError):
            register(site, "one too many")
        assert len(site.workers.members) == MAX_WORKERS


def test_what_was_put_last_is_kept() -> None:
    latest: Latest[int] = Latest(2)
    for worker_id, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        latest.put(worker_id, value)
    assert (latest.get("a"), latest.get("b"), latest.get("c"), len(latest)) == (3, None, 4, 2)
    latest.discard("a")
    latest.discard("a")
    assert "a" not in latest
