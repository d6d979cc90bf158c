"""Padded sizes of passes with chunks of prompts, and the choice among them."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from worker_svc.gpu.graphs import PassGraph, token_sizes
from worker_svc.gpu.mixed_batch import MixedSize
from worker_svc.gpu.mixed_graphs import MixedGraphs
from worker_svc.gpu.pass_counts import GraphKind, NoGraph

MAX_ROWS, MAX_TOKENS = 32, 2048


class CallingGraphs:
    """Captures nothing: a replay is a call."""

    def capture(self, run: Callable[[], None]) -> PassGraph:
        run()
        return SimpleNamespace(replay=run)


def room(num_tokens: int) -> int:
    return num_tokens // 64 + 8


@pytest.fixture(scope="module")
def captured() -> MixedGraphs:
    def run(size: MixedSize) -> Tensor:
        return torch.zeros((size.num_tokens, 2))

    graphs = MixedGraphs(run, room, max_rows=MAX_ROWS, max_tokens=MAX_TOKENS)
    graphs.capture(CallingGraphs(), None)
    return graphs


@pytest.mark.parametrize("max_tokens", [1, 64, 65, 200, 1000, 2048, 8192, 100_000])
def test_every_number_of_tokens_has_a_size_with_little_padding(max_tokens: int) -> None:
    sizes = token_sizes(max_tokens)
    assert list(sizes) == sorted(set(sizes)) and sizes[0] == 64
    assert max_tokens <= sizes[-1] < max_tokens + 64
    assert len(sizes) <= 16 + 8 * max(0, (max_tokens // 1024).bit_length())
    for num_tokens in range(1, max_tokens + 1, 7):
        size = next(size for size in sizes if size >= num_tokens)
        assert size % 64 == 0
        assert size < num_tokens + max(64, num_tokens / 8)


@given(num_tokens=st.integers(1, 3000), num_work=st.integers(1, 200))
def test_a_batch_gets_the_least_graph_that_holds_it(captured: MixedGraphs, num_tokens: int, num_work: int) -> None:
    exact = MixedSize(num_tokens=num_tokens, num_rows=3, num_decode=2, num_work=num_work)
    size, how = captured.choose(exact)
    holds = [each for each in token_sizes(MAX_TOKENS) if each >= num_tokens and room(each) >= num_work]
    if how is GraphKind.MIXED:
        assert size.num_tokens == holds[0] and size.num_work == room(holds[0])
        assert size.num_rows == size.num_decode == min(MAX_ROWS, holds[0])
        assert size.num_tokens <= max(64, 2 * num_tokens + 64)
        return
    assert size == exact
    if how is NoGraph.TOO_MANY_TOKENS:
        assert num_tokens > MAX_TOKENS
    else:
        assert how is NoGraph.MANY_SHORT_CHUNKS
        assert not holds or holds[0] > 2 * num_tokens


def test_without_a_capture_there_is_no_graph() -> None:
    graphs = MixedGraphs(lambda size: torch.zeros(1), room, max_rows=4, max_tokens=64)
    exact = MixedSize(num_tokens=3, num_rows=1, num_decode=0, num_work=1)
    assert graphs.choose(exact) == (exact, NoGraph.NO_GRAPHS)
    graphs.capture(CallingGraphs(), 0)
    assert graphs.choose(exact) == (exact, NoGraph.NO_GRAPHS)
