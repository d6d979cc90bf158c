"""Small models with weights of 8 and 4 bits end to end, computed with kernels: passes, and whole steps by graphs.

Against the same weights with the torch references, and against models that have the dequantised numbers as weights.
"""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tests.kernels.on_device.devices import DEVICE, HAS_GPU, needs_e4m3
from tests.kernels.on_device.test_device_runner import run_kernels, run_references
from tests.kernels.on_device.test_forward import runner_of, steps
from tests.worker.device.sample_steps import comparable, decode_steps
from tests.worker.quantised_models import FAST_HIDDEN, load_quantised, widened, write_wide_model
from tests.worker.tiny_models import random_prompts
from worker_svc.gpu import torch_operations, triton_operations
from worker_svc.gpu.quantised_products import QuantisedForm
from worker_svc.model.decoder import Decoder
from worker_svc.operations import Operations

CPU = torch.device("cpu")
KERNELS, REFERENCES = triton_operations.OPERATIONS, torch_operations.OPERATIONS
MARKS: dict[QuantisedForm, Any] = {"fp8": needs_e4m3, "int4": ()}
FORMS = [pytest.param(form, marks=MARKS[form]) for form in get_args(QuantisedForm)]
# Mean error, as part of the logits' standard deviation. With e4m3 a number of a row that lies between two steps, to
# within the rounding of float32, may go to either.
NEAR: dict[QuantisedForm, float] = {"fp8": 0.01, "int4": 1e-4}


def logits_of(decoder: Decoder, operations: Operations) -> Tensor:
    """Logits of a whole prompt, then of one token at a time beside chunks of another prompt."""
    return torch.cat(steps(runner_of(decoder, operations), random_prompts((9, 6))))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_kernels_give_the_logits_of_the_references_and_of_the_dequantised_weights(
    family: str, form: QuantisedForm, tmp_path: Path
) -> None:
    folder = write_wide_model(family, tmp_path)
    decoder = load_quantised(folder, form, torch.float32, CPU)
    exact = logits_of(widened(decoder, torch.float32), REFERENCES)
    if HAS_GPU and form == "fp8":  # its products have 16 bits
        same, ours = (
            logits_of(load_quantised(folder, form, torch.bfloat16, device), operations).cpu()
            for device, operations in ((CPU, REFERENCES), (DEVICE, KERNELS))
        )
        assert (ours - exact).abs().mean() <= 2 * (same - exact).abs().mean()
        return
    same = logits_of(decoder, REFERENCES)
    ours = logits_of(load_quantised(folder, form, torch.float32, DEVICE), KERNELS).cpu()
    for expected in (same, exact):
        assert (ours - expected).abs().mean() <= NEAR[form] * expected.std()


@pytest.mark.parametrize("form", FORMS)
def test_captured_steps_sample_what_the_references_do(form: QuantisedForm, tmp_path: Path) -> None:
    """With e4m3 on a GPU products have 16 bits, so draws may differ; a prompt's likeliest tokens are as likely."""
    folder = write_wide_model("llama", tmp_path, FAST_HIDDEN)
    has_16_bits = HAS_GPU and form == "fp8"
    dtype = torch.bfloat16 if has_16_bits else torch.float32
    ours, _ = run_kernels(load_quantised(folder, form, dtype, DEVICE), decode_steps(2), None, depth=2)
    expected = run_references(load_quantised(folder, form, dtype, CPU), decode_steps(2))
    if has_16_bits:
        for index, row in expected[0].logprobs.items():
            assert list(ours[0].logprobs[index].top_logprobs) == pytest.approx(
                list(row.top_logprobs), abs=0.5
            )  # rows round apart
        return
    assert [comparable(result) for result in ours] == [comparable(result) for result in expected]
