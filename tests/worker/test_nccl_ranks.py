"""Sums and joins by a process group of torch: its real signatures, with Gloo in the place of NCCL, and its end."""

import datetime
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from tests.patience import patient
from worker_svc.ranks.nccl_ranks import NcclRanks
from worker_svc.ranks.rank_store import RankStore
from worker_svc.start.device_ranks import connect_devices

LONG = datetime.timedelta(seconds=60)


def on_all(size: int, work: Any) -> list[Any]:
    """Call `work` for each rank in a thread, with process groups of torch; its results."""
    store = HashStore()

    def run(rank: int) -> Any:
        group: Any = ProcessGroupGloo(store, rank, size, LONG)
        return work(NcclRanks(group, rank, size))

    with ThreadPoolExecutor(size) as threads:
        return [each.result() for each in [threads.submit(run, rank) for rank in range(size)]]


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def whole(num_columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(3 * num_columns, dtype=torch.float32).view(3, num_columns).to(dtype)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("num_columns", [12, 211, 7], ids=["equal parts", "a shorter last part", "few"])
def test_columns_are_joined_on_all_ranks(size: int, num_columns: int) -> None:
    width = -(-num_columns // size)
    expected = whole(num_columns)

    def join(ranks: NcclRanks) -> Tensor:
        out = torch.full_like(expected, float("nan"))
        own = out[:, ranks.rank * width : (ranks.rank + 1) * width]  # in its place in the result
        own.copy_(expected[:, ranks.rank * width : (ranks.rank + 1) * width])
        ranks.join_columns(own, out)
        return out

    for joined in on_all(size, join):
        assert torch.equal(joined, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_have_the_same_bits_on_all_ranks(dtype: torch.dtype) -> None:
    def add(ranks: NcclRanks) -> Tensor:
        rows = whole(5, dtype) * (ranks.rank + 1)
        ranks.sum_rows(rows)
        return rows

    for total in on_all(3, add):
        assert torch.equal(total, whole(5, dtype) * 6)


def test_rows_are_collected_by_rank_0() -> None:
    def collect(ranks: NcclRanks) -> Tensor | None:
        out = torch.empty(3, 7) if ranks.rank == 0 else None
        ranks.collect_columns(whole(7)[:, ranks.rank * 4 : ranks.rank * 4 + 4], out, 7)
        return out

    first, second = on_all(2, collect)
    assert torch.equal(first, whole(7)) and second is None


def test_no_rows_need_no_exchange() -> None:
    ranks = NcclRanks(NoGroup(), 0, 2)
    ranks.sum_rows(torch.empty(0, 4))
    ranks.join_columns(torch.empty(0, 2), torch.empty(0, 4))


def test_a_first_exchange_is_made_before_any_capture() -> None:
    def warm_up(ranks: NcclRanks) -> bool:
        ranks.warm_up(torch.device("cpu"))
        return ranks.has_failed

    assert on_all(2, warm_up) == [False, False]


class GlooAsNccl:
    """The constructor of `ProcessGroupNCCL`, which builds of torch for CPUs lack; the ranks reduce by Gloo."""

    class Options:
        _timeout: datetime.timedelta

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0", "torch reads it here"
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        self._group: Any = ProcessGroupGloo(store, rank, size, options._timeout)
        self._is_connected = False

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._is_connected = True

    def __getattr__(self, name: str) -> Any:
        assert self._is_connected, "a communicator that is made by its first collective may be made in a capture"
        return getattr(self._group, name)


def test_ranks_on_devices_are_connected_before_their_first_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C._distributed_c10d, "ProcessGroupNCCL", GlooAsNccl, raising=False)
    for name in ("BLOCKING_WAIT", "ASYNC_ERROR_HANDLING", "ENABLE_MONITORING"):
        monkeypatch.setenv(f"TORCH_NCCL_{name}", "1")  # whatever the user has for other programs
    monkeypatch.setitem(sys.modules, "worker_svc.ranks.nccl_group", None)
    del sys.modules["worker_svc.ranks.nccl_group"]  # it is imported anew, and gone again after the test
    master = RankStore("127.0.0.1", 0, 2, is_master=True)

    def connect(rank: int) -> Tensor:
        store = RankStore("127.0.0.1", master.port, 2, is_master=False) if rank else master
        ranks = connect_devices(store, rank, 2, torch.device("cpu"), LONG.total_seconds())
        rows = torch.full((1, 3), rank + 1.0)
        ranks.sum_rows(rows)
        return rows

    with ThreadPoolExecutor(2) as threads:
        totals = list(threads.map(connect, range(2)))
    assert [each.tolist() for each in totals] == [[[3.0] * 3]] * 2


def test_an_abort_that_does_not_return_keeps_no_process_from_its_end() -> None:
    group = NoGroup()
    ranks = NcclRanks(group, 0, 2)
    began_s = time.monotonic()
    ranks.fail()
    assert time.monotonic() - began_s < patient(10.0)
    assert ranks.has_failed and group.is_aborting.is_set()
    group.may_return.set()


class NoGroup:
    """A process group that must not be asked for anything, and whose abort waits."""

    def __init__(self) -> None:
        self.is_aborting, self.may_return = threading.Event(), threading.Event()

    def allreduce(self, tensors: list[Tensor], opts: object) -> None:
        raise AssertionError("nothing is exchanged")

    def _allgather_base(self, output: Tensor, input: Tensor, opts: object) -> None:
        raise AssertionError("nothing is exchanged")

    def abort(self) -> None:
        self.is_aborting.set()
        self.may_return.wait()
