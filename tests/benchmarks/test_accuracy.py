"""The benchmark of accuracy: what it computes is the model's loss, however the text is cut, and int8 rounds."""

import pytest
import torch

from benchmarks.cpu.accuracy import MODEL, STORAGES, StoredModel, held_out, measure
from tests.worker.paged_runner import reference_logits
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.batch import ForwardBatch
from worker_svc.model.decoder import load_decoder


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_the_loss_is_that_of_the_plain_decoder_in_one_pass() -> None:
    (batch,) = held_out(1)
    window = batch[0, :100]
    decoder = load_decoder(MODEL, torch.float32, torch.device("cpu"))
    pool = KVPool(decoder.block_shape(100), 1, torch.device("cpu"))
    one_pass = ForwardBatch(
        token_ids=window,
        positions=torch.arange(100),
        slot_mapping=torch.arange(100),
        query_start=torch.tensor([0, 100], dtype=torch.int32),
        context_lens=torch.tensor([100], dtype=torch.int32),
        block_tables=torch.tensor([[0]], dtype=torch.int32),
        logit_rows=torch.arange(100),
        max_query_len=100,
        max_context_len=100,
    )
    logits = reference_logits(decoder, one_pass, pool)
    expected = torch.nn.functional.cross_entropy(logits[:-1], window[1:]).item()
    assert StoredModel.demo("float32", "float32").predict([window[None]], chunk=32).loss == pytest.approx(
        expected, rel=1e-5
    )


def test_predictions_do_not_depend_on_how_the_text_is_cut() -> None:
    batch = held_out(1)[0][:2, :120]
    for weights, kv in STORAGES:
        model = StoredModel.demo(weights, kv)
        whole, cut = (model.predict([batch], chunk) for chunk in (1000, 7))
        assert whole.loss == pytest.approx(cut.loss, rel=1e-12)


def test_every_way_to_store_is_near_float32_and_int8_rounds() -> None:
    exact, *others = measure([batch[:, :128] for batch in held_out(2048)], chunk=32)
    assert (exact.weights, exact.kv, exact.percent, exact.same_best_percent) == ("float32", "float32", 0.0, 100.0)
    assert [(each.weights, each.kv) for each in others] == [*STORAGES[1:]]
    assert len({each.loss for each in (exact, *others)}) == 4
    assert all(abs(each.percent) < 2 and each.same_best_percent > 95 for each in others)
    assert all(0 < each.mean_change < 0.02 for each in others)
    assert (
        others[1].kv_bytes_per_token / exact.kv_bytes_per_token == 36 / 128
    )  # a byte each, and a scale for 32 of them
