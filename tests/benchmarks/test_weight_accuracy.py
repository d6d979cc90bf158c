"""The benchmark of weights of 8 and 4 bits: its figures of the demo model, on a little text, are within its targets."""

import pytest
import torch

from benchmarks.cpu.accuracy import held_out
from benchmarks.cpu.weight_accuracy import MOST_PERCENT, measure


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_the_demo_model_loses_little_by_weights_of_8_and_4_bits() -> None:
    exact, fp8, int4 = measure([batch[:, :256] for batch in held_out(2048)], chunk=256)
    assert (exact.percent, exact.mean_change, exact.same_best_percent) == (0.0, 0.0, 100.0)
    # Of float32's four bytes: one, and scales; a half, and scales and zero points.
    assert fp8.layer_bytes / exact.layer_bytes == pytest.approx(0.25, abs=0.01)
    assert int4.layer_bytes / exact.layer_bytes == pytest.approx(0.135, abs=0.01)
    assert abs(fp8.percent) <= MOST_PERCENT["fp8"] and abs(int4.percent) <= MOST_PERCENT["int4"]
    assert 0 < fp8.mean_change < int4.mean_change < 0.03  # nats a token
    assert fp8.same_best_percent >= 98 and int4.same_best_percent >= 95
