"""Decoders with weights of 8 and 4 bits: which products are quantised, what they take, and how ranks divide them."""

from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import structlog
import torch
from torch import Tensor

from kernels.products import fp8_product
from kernels.products.fp8_product import Fp8Matrix
from kernels.products.int4_matrix import WORDS
from quire.worker_settings import WorkerSettings
from tests.worker.quantised_models import HIDDEN, INTERMEDIATE, load_quantised, widened, write_wide_model
from tests.worker.tiny_models import write_tiny_model
from worker_svc.gpu import torch_operations
from worker_svc.gpu.quantised_products import Fp8Linear, Int4Linear, QuantisedForm, with_operations
from worker_svc.model.decoder import Decoder, load_decoder
from worker_svc.model.layers import Linear, Product
from worker_svc.model.model_part import ModelPart
from worker_svc.option_check import OptionError
from worker_svc.start.loading import load_model
from worker_svc.start.start_notices import notices
from worker_svc.start.weight_form import check_weight_form

CPU = torch.device("cpu")
KINDS = {"fp8": Fp8Linear, "int4": Int4Linear}
BITS = {"fp8": 8, "int4": 4}
FORMS = get_args(QuantisedForm)


def layer_products(decoder: Decoder) -> list[Product]:
    """The products of all layers: query, key and value; output; up; down."""
    return [
        product
        for layer in decoder.layers
        for product in (layer.attention.qkv, layer.attention.out, layer.mlp.up, layer.mlp.down)
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_the_products_of_layers_are_quantised_and_those_outside_of_them_are_not(
    family: str, form: QuantisedForm, tmp_path: Path
) -> None:
    decoder = load_quantised(write_wide_model(family, tmp_path), form, torch.bfloat16, CPU)
    assert {type(each) for each in layer_products(decoder)} == {KINDS[form]}
    outside = [each for each in (decoder.head, decoder.project_in, decoder.project_out) if each is not None]
    assert {type(each) for each in outside} == {Linear} and len(outside) == (3 if family == "opt" else 1)
    assert decoder.token_embedding.dtype == decoder.dtype == torch.bfloat16


def test_products_whose_shape_does_not_fit_stay_as_they_are(tmp_path: Path) -> None:
    """The tiny model has 64 inputs, less than a group, and 112 of an MLP, a multiple of 16."""
    folder = write_tiny_model("llama_biases", tmp_path)  # 4 + 2 * 2 heads of 24
    fp8, int4 = (layer_products(load_quantised(folder, form, torch.float32, CPU)) for form in FORMS)
    assert {type(each) for each in fp8} == {Fp8Linear}
    assert {type(each) for each in int4} == {Linear}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_product_of_float16_with_e4m3_adds_a_bias(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros, if the model has none, which lie in fixed memory: without a bias some devices' results are wrong."""
    product = load_quantised(write_wide_model("llama", tmp_path), "fp8", dtype, CPU).layers[0].attention.qkv
    multiply = fp8_product.fp8_product
    given: list[Tensor | None] = []

    def recording(rows: Fp8Matrix, weight: Fp8Matrix, bias: Tensor | None, of: torch.dtype) -> Tensor:
        given.append(bias)
        return multiply(rows, weight, bias, of)

    monkeypatch.setattr(fp8_product, "fp8_product", recording)
    for _ in range(2):
        product(torch.ones(3, HIDDEN, dtype=dtype))
    first, second = given
    assert first is second
    if dtype != torch.float16:
        assert first is None
    else:
        assert first is not None and first.dtype == dtype and not first.any()


@pytest.mark.parametrize("form", FORMS)
def test_the_memory_of_weights_is_what_their_tensors_take(form: QuantisedForm, tmp_path: Path) -> None:
    folder = write_wide_model("llama", tmp_path)
    plain, quantised = load_decoder(folder, torch.bfloat16, CPU), load_quantised(folder, form, torch.bfloat16, CPU)
    was = sum(each.nbytes for each in layer_products(plain))
    saved = was - sum(each.nbytes for each in layer_products(quantised))
    assert quantised.weight_bytes == plain.weight_bytes - saved
    assert quantised.num_parameters == plain.num_parameters
    share = (was - saved) / was  # scales take a little beside the codes
    assert BITS[form] / 16 < share < BITS[form] / 16 + 0.02


@pytest.mark.parametrize("form", FORMS)
def test_operations_are_bound_without_a_copy_of_the_weights(form: QuantisedForm, tmp_path: Path) -> None:
    decoder = load_quantised(write_wide_model("llama", tmp_path), form, torch.float32, CPU)
    bound = with_operations(decoder, torch_operations.OPERATIONS)
    for before, after in zip(layer_products(decoder), layer_products(bound), strict=True):
        assert isinstance(before, Fp8Linear | Int4Linear) and isinstance(after, Fp8Linear | Int4Linear)
        assert after.weight.codes is before.weight.codes
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0))
    qkv, wide = (each.layers[0].attention.qkv(x) for each in (bound, widened(decoder, torch.float32)))
    torch.testing.assert_close(qkv, wide, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_a_rank_holds_the_slices_of_the_whole(form: QuantisedForm, tmp_path: Path) -> None:
    """Slices of outputs are equal; those of inputs are whole groups in 4 bits, or have scales of their own."""
    folder = write_wide_model("llama", tmp_path)
    whole = load_quantised(folder, form, torch.float32, CPU)
    ranks = [load_quantised(folder, form, torch.float32, CPU, ModelPart(rank, 2)) for rank in range(2)]
    wide, parts = widened(whole, torch.float32), [widened(rank, torch.float32) for rank in ranks]
    assert torch.equal(
        torch.cat([half for part in parts for half in weight_of(part.layers[0].mlp.up).chunk(2)[:1]]),
        weight_of(wide.layers[0].mlp.up)[:INTERMEDIATE],
    )
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0))
    for part, of_part in enumerate(parts):
        rows = slice(part * HIDDEN // 2, (part + 1) * HIDDEN // 2)
        out, of_whole = weight_of(of_part.layers[0].attention.out), weight_of(wide.layers[0].attention.out)[:, rows]
        if form == "int4":
            assert torch.equal(out, of_whole)
            codes = (each.layers[0].attention.out for each in (ranks[part], whole))
            ours, theirs = (each.weight.codes for each in codes if isinstance(each, Int4Linear))
            words = HIDDEN // 2 // 128 * WORDS
            assert torch.equal(ours, theirs[:, part * words : (part + 1) * words])
        else:  # the same to within steps next to zero, since scales are powers of two
            assert (out - of_whole).abs().max() <= 2.0**-10 * scale_of(whole.layers[0].attention.out)
    summed = sum(
        part.layers[0].attention.out(x[:, index * 128 : (index + 1) * 128]) for index, part in enumerate(parts)
    )
    torch.testing.assert_close(summed, wide.layers[0].attention.out(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("form", FORMS)
def test_a_loaded_worker_says_in_which_form_its_weights_are(form: QuantisedForm, tmp_path: Path) -> None:
    """Keys and values that come of other weights are others, so blocks do not travel between the forms."""
    folder = write_wide_model("llama", tmp_path)
    told = {}
    sizes: dict[str, Any] = {"model": str(folder), "num_blocks": 20, "max_num_seqs": 4}
    forms: tuple[Literal["auto"], QuantisedForm] = ("auto", form)
    for dtype in forms:
        loaded = load_model(WorkerSettings(**sizes, device="cpu", runner="device", weight_dtype=dtype))
        assert loaded.travel is not None and loaded.description.memory is not None
        told[dtype] = loaded.description
        assert (f" {form} " in loaded.travel.format) == (dtype == form)
    plain, quantised = told["auto"], told[form]
    assert (plain.weight_dtype, quantised.weight_dtype) == (plain.model.dtype, form)
    assert plain.memory is not None and quantised.memory is not None
    assert quantised.memory.weight_bytes < 0.5 * plain.memory.weight_bytes
    assert f"weights of the layers {form}" in notices(quantised)["dtype"]
    assert "weights of the layers" not in notices(plain)["dtype"]


def test_the_start_warns_of_products_that_do_not_fit(tmp_path: Path) -> None:
    folder = write_wide_model("llama", tmp_path)
    decoder = load_quantised(folder, "int4", torch.float32, CPU)
    with structlog.testing.capture_logs() as logs:
        check_weight_form(decoder, "int4")
    assert not logs
    product = decoder.layers[0].mlp.down
    mixed = decoder.with_layer_products(lambda each: Linear(torch.ones(1, 1), None) if each is product else each)
    with structlog.testing.capture_logs() as logs:
        check_weight_form(mixed, "int4")
    (line,) = logs
    assert line["log_level"] == "warning"
    assert line["event"] == "1 of 8 products of the layers stay in float32: their inputs are no multiple of 128"


def test_a_form_that_fits_no_product_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model("llama_biases", tmp_path)  # 64 inputs
    sizes: dict[str, Any] = {"num_blocks": 20, "max_num_seqs": 4, "device": "cpu", "runner": "device"}
    with pytest.raises(OptionError, match=r"--weight-dtype int4 fits no product of this model, whose inputs are no "):
        load_model(WorkerSettings(model=str(folder), weight_dtype="int4", **sizes))


def weight_of(product: Product) -> Tensor:
    assert isinstance(product, Linear)
    return product.weight


def scale_of(product: Product) -> float:
    assert isinstance(product, Fp8Linear)
    return float(product.weight.scales.max())
