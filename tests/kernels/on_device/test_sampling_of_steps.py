"""Steps sampled by the kernels, from packed parameters to the answer."""

import pytest
import torch

from kernels.sampling import token_choice
from tests.kernels.on_device.devices import DEVICE, HAS_GPU
from tests.worker.device.sampling_cases import assert_same_candidates, assert_same_samples, random_case
from worker_svc.gpu import torch_operations, triton_operations
from worker_svc.sampling.sampler import Sampler
from worker_svc.sampling.sampling_columns import SamplingColumns


@pytest.mark.parametrize("seed", range(3))
def test_any_mix_of_samples_is_the_hosts(seed: int) -> None:
    case = random_case(triton_operations.OPERATIONS, seed, count=6, device=DEVICE)
    assert_same_samples(case.sampled_on_device(), case.sampled_on_host())


@pytest.mark.parametrize("seed", range(3))
def test_any_mix_of_candidates_is_the_references(seed: int) -> None:
    """On the same device, since another rounds log-probabilities differently, and penalties make near ties."""
    case = random_case(triton_operations.OPERATIONS, 50 + seed, count=6, device=DEVICE)
    counts = [min(case.vocab_size, 1 + 3 * i) for i in range(6)]
    found = case.ranked_on_device(counts)
    case.operations = torch_operations.OPERATIONS
    assert_same_candidates(found, case.ranked_on_device(counts))


def test_a_warm_up_runs_every_kernel() -> None:
    case = random_case(triton_operations.OPERATIONS, 3, count=1, device=DEVICE)
    columns = SamplingColumns(2, case.vocab_size)
    Sampler(columns, case.operations.sampling).warm_up(case.logits.to(DEVICE), case.tokens)


@pytest.mark.skipif(not HAS_GPU, reason="only a GPU can be waited for")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device() -> None:
    for seed in range(20):
        case = random_case(triton_operations.OPERATIONS, 100 + seed, count=20, device=DEVICE)
        for case.may_wait in (True, False):  # first kernels are compiled
            case.sampled_on_device()
            case.ranked_on_device([1] * 20)


@pytest.mark.skipif(not HAS_GPU, reason="only a GPU has graphs")
def test_a_captured_choice_is_that_of_the_logits_at_its_replay() -> None:
    case = random_case(triton_operations.OPERATIONS, 7, count=20, device=DEVICE)
    rows = case.packed().rows
    logits = torch.zeros_like(case.logits, device=DEVICE)
    token_choice.choose_tokens(logits, rows)  # kernels are compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = token_choice.choose_tokens(logits, rows)
    logits.copy_(case.logits)
    graph.replay()
    expected = token_choice.choose_tokens(logits, rows)
    assert captured.token_ids.tolist() == expected.token_ids.tolist()
    assert captured.valid.tolist() == expected.valid.tolist()
