"""Sizes at which a pass is captured, and what is replayed without a GPU."""

import pytest

from worker_svc.gpu.graphs import CapturedPass, graph_sizes


@pytest.mark.parametrize("max_rows", [1, 2, 3, 16, 17, 100, 256, 1000, 4096])
def test_every_batch_has_a_size_with_little_padding(max_rows: int) -> None:
    sizes = graph_sizes(max_rows)
    captured = CapturedPass(lambda size: None, sizes)
    assert list(sizes) == sorted(set(sizes))
    assert len(sizes) <= 5 + max_rows // 16 and len(sizes) < 50
    for num_rows in range(1, max_rows + 1):
        size = captured.size_for(num_rows)
        assert num_rows <= size < num_rows + max(1, min(num_rows, 16), num_rows / 8)
        assert size in sizes


def test_a_replay_without_a_gpu_is_a_call_at_that_size() -> None:
    calls: list[int] = []
    captured = CapturedPass(calls.append, [1, 2, 4])
    captured.replay(captured.size_for(3))
    captured.release()
    captured.replay(1)
    assert calls == [4, 1]
