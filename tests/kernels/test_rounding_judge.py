"""Judge of half precision on a GPU, tried without one: rounding passes, and what is broken by hand does not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.step import Step
from kernels.sampling.choice_reference import ChosenTokens, SampleRows
from kernels.sampling.logit_edits import LogitEdits
from tests.kernels.on_device.rounding import ScoredRun, assert_apart_by_rounding, scored_run
from tests.worker.device.sample_steps import DRAWN, decode_steps
from tests.worker.tiny_models import write_tiny_model
from worker_svc.gpu.torch_operations import OPERATIONS
from worker_svc.model.decoder import Decoder, load_decoder
from worker_svc.model.layers import Linear, Product
from worker_svc.operations import Operations

CPU = torch.device("cpu")
NUM_STEPS = 12
BROKEN_CALL = 4  # of the choices of tokens; the first has the prompts


@dataclass(frozen=True, slots=True)
class NudgedLinear(Linear):
    """The product, of which two numbers in nine is moved by about a unit in the last place, at random."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        product = F.linear(x, self.weight, self.bias)
        nudges = torch.randint(-4, 5, product.shape).div(4, rounding_mode="trunc") * torch.finfo(product.dtype).eps
        return (product.float() * (1 + nudges)).to(product.dtype)


def nudged(product: Product) -> Product:
    assert isinstance(product, Linear)
    return NudgedLinear(product.weight, product.bias)


@dataclass(frozen=True)
class References:
    """Decoders of one model, and their runs."""

    half: Decoder
    reference: ScoredRun
    exact: ScoredRun

    def judge(self, decoder: Decoder, steps: Sequence[Step], operations: Operations = OPERATIONS) -> None:
        """Judge what a decoder answers to the steps, in the place of kernels on a GPU."""
        torch.manual_seed(0)
        ours = scored_run(decoder, steps, operations).results
        assert_apart_by_rounding(steps, ours, self.reference, self.exact, DRAWN.repetition_penalty)


@pytest.fixture(scope="module", params=["opt", "llama_gqa", "mistral", "olmo2"])
def references(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> References:
    folder: Path = write_tiny_model(request.param, tmp_path_factory.mktemp("model"), dtype=torch.float16)
    half, exact = (load_decoder(folder, dtype, CPU) for dtype in (torch.float16, torch.float32))
    return References(half, *(scored_run(each, decode_steps(NUM_STEPS)) for each in (half, exact)))


def test_other_rounding_passes(references: References) -> None:
    references.judge(references.half.with_layer_products(nudged), decode_steps(NUM_STEPS))


def broken(change: Callable[[Tensor, Tensor], Tensor]) -> Operations:
    """Operations of which one choice of tokens is changed, given those before."""
    choose, chosen = OPERATIONS.sampling.choose_tokens, list[Tensor]()

    def choose_wrongly(logits: Tensor, rows: SampleRows, edits: LogitEdits | None, token_table: Tensor) -> ChosenTokens:
        right = choose(logits, rows, edits, token_table)
        chosen.append(right.token_ids)
        return replace(right, token_ids=change(*chosen[-2:])) if len(chosen) == BROKEN_CALL else right

    return replace(OPERATIONS, sampling=replace(OPERATIONS.sampling, choose_tokens=choose_wrongly))


@pytest.mark.parametrize(
    "change",
    [lambda before, now: before, lambda before, now: now.roll(1), lambda before, now: now[[0, 1, 3, 2]]],
    ids=["those of the step before", "those of other seats", "two seats' exchanged"],
)
def test_wrong_tokens_fail(references: References, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(AssertionError):
        references.judge(references.half, decode_steps(NUM_STEPS), broken(change))


@pytest.mark.parametrize("source", [10, 11, 50])
def test_a_copy_of_a_wrong_block_fails(references: References, source: int) -> None:
    """The samples share a prompt of nine tokens; each gets a copy of its last block, here one of them of another."""
    steps = decode_steps(NUM_STEPS)
    assert steps[1].copies == [12, 20, 12, 21]
    steps[1].copies = [12, 20, source, 21]
    with pytest.raises(AssertionError):
        references.judge(references.half, steps)


def test_a_sequence_that_reads_anothers_block_fails(references: References) -> None:
    steps = decode_steps(NUM_STEPS)
    steps[0].whole[2].block_table = [10, 10]
    with pytest.raises(AssertionError):
        references.judge(references.half, steps)
