"""The accelerator's forward pass, computed with the torch references, against the decoder's own."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.cascade_groups import SharedPrefix
from kernels.attention.cascade_reference import CascadePlan
from kernels.attention.decode_reference import DecodePlan, DecodeRows, empty_plan
from kernels.layers.step_inputs_reference import SeatTables
from tests.worker.device.device_paged_runner import MAX_ROWS, DevicePagedRunner
from tests.worker.paged_runner import PagedRunner, PagedSequence, forward_batch, reference_logits
from tests.worker.tiny_models import TINY_MODELS, random_prompts, write_tiny_model
from worker_svc.gpu.torch_operations import OPERATIONS
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.config_values import ACTIVATION_NAMES
from worker_svc.model.decoder import Decoder, load_decoder

CPU = torch.device("cpu")
DEMO_MODEL = Path(__file__).parents[3] / "demo" / "model"
PROMPT_LENGTHS = (1, 15, 17, 33, 48)
NUM_TOKENS = 10
NUM_BLOCKS = 24  # five sequences of at most 48 + 10 tokens hold 1 + 2 + 2 + 3 + 4 blocks of 16


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def tiny_decoder(name: str, folder: Path, dtype: torch.dtype | None = None) -> Decoder:
    return load_decoder(write_tiny_model(name, folder), dtype, CPU)


def generate(runner: PagedRunner) -> tuple[list[list[int]], list[Tensor]]:
    """The tokens, and the logits of each step; chunks of prompts and rows of one token come together."""
    logits: list[Tensor] = []
    sequences = [PagedSequence(prompt, len(prompt)) for prompt in random_prompts(PROMPT_LENGTHS)]
    while any(len(sequence.output) < NUM_TOKENS for sequence in sequences):
        logits.append(runner.step(sequences[: len(logits) + 1], 7))
    return [sequence.output[:NUM_TOKENS] for sequence in sequences], logits


@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_greedy_tokens_and_cache_are_those_of_the_decoder(name: str, tmp_path: Path) -> None:
    decoder = tiny_decoder(name, tmp_path)
    reference = PagedRunner(decoder, num_blocks=NUM_BLOCKS, block_size=16)
    runner = DevicePagedRunner(decoder, OPERATIONS, num_blocks=NUM_BLOCKS)
    expected, expected_logits = generate(reference)
    tokens, logits = generate(runner)
    scale = torch.cat(expected_logits).std()
    for step, expected_step in zip(logits, expected_logits, strict=True):
        assert (step - expected_step).abs().max() <= 1e-4 * scale
    assert tokens == expected
    assert reference.num_mixed_steps > 0
    torch.testing.assert_close(runner.pool.blocks, reference.pool.blocks, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama_gqa", "opt_350m_style", "gpt2"])
def test_half_precision_is_as_good_as_the_decoder_s(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    sequence = PagedSequence(random_prompts((40,))[0], 40, block_table=[3, 0, 2])
    folder = write_tiny_model(name, tmp_path, dtype=dtype)
    exact, theirs, ours = (
        runner.compute([sequence], [40])
        for runner in (
            PagedRunner(load_decoder(folder, torch.float32, CPU), num_blocks=4, block_size=16),
            PagedRunner(load_decoder(folder, None, CPU), num_blocks=4, block_size=16),
            DevicePagedRunner(load_decoder(folder, None, CPU), OPERATIONS, num_blocks=4),
        )
    )
    epsilon = torch.finfo(dtype).eps * exact.abs().max()
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max() + epsilon


def test_logits_are_of_the_models_dtype_and_of_the_wanted_tokens(tmp_path: Path) -> None:
    runner = DevicePagedRunner(tiny_decoder("llama_gqa", tmp_path, torch.bfloat16), OPERATIONS, num_blocks=4)
    batch = runner.lay_out([PagedSequence(random_prompts((20,))[0], 20, block_table=[2, 0])], [20])
    state = runner.forward.forward(batch.inputs, batch.attention)
    some = runner.forward.logits(state, torch.tensor([19, 3]))
    assert runner.forward.logits(state, torch.tensor([], dtype=torch.int64)).shape == (0, runner.forward.vocab_size)
    every = runner.forward.logits(state, None)
    assert some.dtype == every.dtype == runner.forward.dtype == torch.bfloat16
    torch.testing.assert_close(some, every[[19, 3]])


@pytest.mark.parametrize("name", ["opt", "llama_gqa", "mistral"])
def test_nothing_but_padding_is_finite_and_writes_nothing(name: str, tmp_path: Path) -> None:
    runner = DevicePagedRunner(tiny_decoder(name, tmp_path), OPERATIONS, num_blocks=4)
    batch = runner.lay_out([PagedSequence([5], 1, block_table=[1])], [1])
    padding = torch.full((4,), -1)
    inputs = batch.inputs
    runner.plans.gather(SeatTables(padding.view(1, 4), padding.view(1, 4)), padding, padding, inputs)
    runner.plans.fill(batch.attention.decode)
    assert runner.forward.logits(runner.forward.forward(inputs, batch.attention), None).isfinite().all()
    assert runner.pool.blocks.isnan().all()


def test_with_a_pool_of_e4m3_a_trained_model_predicts_nearly_the_same() -> None:
    decoder = load_decoder(DEMO_MODEL, torch.float32, CPU)
    text = [1, 5, 9]
    text += PagedRunner(decoder, num_blocks=4, block_size=16).generate([text], 60, batch_size=1, chunk=100)[0]
    sequence = PagedSequence(text, 3, block_table=[3, 0, 2, 1])
    exact_runner = PagedRunner(decoder, num_blocks=4, block_size=16)
    exact = reference_logits(
        decoder, forward_batch([sequence], [60], 16, all_logits=True), exact_runner.pool
    ).log_softmax(1)
    runner = DevicePagedRunner(decoder, OPERATIONS, num_blocks=4, kv_dtype=torch.float8_e4m3fn)
    batch = runner.lay_out([sequence], [60])
    ours = runner.forward.logits(runner.forward.forward(batch.inputs, batch.attention), None).log_softmax(1)
    divergence = (exact.exp() * (exact - ours)).sum(1)
    assert 0.0 < divergence.mean() < 0.001  # nats; 0.0002 when this was written
    assert divergence.max() < 0.01


@pytest.mark.parametrize("name", ["llama_gqa", "opt", "mistral"])
def test_a_pool_of_e4m3_is_read_as_the_numbers_that_are_in_it(name: str, tmp_path: Path) -> None:
    decoder = tiny_decoder(name, tmp_path)
    runner = DevicePagedRunner(decoder, OPERATIONS, num_blocks=NUM_BLOCKS, kv_dtype=torch.float8_e4m3fn)
    sequences = [PagedSequence(prompt, len(prompt)) for prompt in random_prompts((20, 33))]
    runner.step(sequences, 100)
    runner.step(sequences, 100)
    counts = [1, 1]
    logits = runner.compute(sequences, counts)
    widened = DevicePagedRunner(decoder, OPERATIONS, num_blocks=NUM_BLOCKS)
    widened.pool.blocks.copy_(runner.pool.blocks.float())  # the keys and values of this very step, too
    batch = widened.lay_out(sequences, counts)
    inputs = replace(batch.inputs, slot_mapping=torch.full_like(batch.inputs.slot_mapping, -1))
    state = widened.forward.forward(inputs, batch.attention)
    assert torch.equal(widened.forward.logits(state, batch.last_tokens), logits)


def test_the_decoder_itself_refuses_a_pool_of_another_dtype(tmp_path: Path) -> None:
    decoder = tiny_decoder("opt", tmp_path)
    runner = PagedRunner(decoder, num_blocks=4, block_size=16)
    runner.pool = KVPool(decoder.block_shape(16, torch.float8_e4m3fn), 4, CPU)
    with pytest.raises(AssertionError, match="device runner"):
        runner.step([PagedSequence([5, 6], 2)], 2)


@pytest.mark.parametrize("name", ["llama_gqa", "qwen2_window", "opt"])
def test_rows_that_share_blocks_attend_to_these_together_with_the_same_result(name: str, tmp_path: Path) -> None:
    runner = DevicePagedRunner(tiny_decoder(name, tmp_path), OPERATIONS, num_blocks=40, block_size=4)
    assert runner.plans.can_share_prefixes
    sequences = runner.sharing_sequences(num_sharers=5, num_shared_blocks=7)
    order = [0, 5, 1, 2, 3, 4]
    sequences = [sequences[row] for row in order]
    counts = [1] * len(sequences)
    expected = runner.compute(sequences, counts)
    shared = SharedPrefix(rows=(0, 2, 3, 4, 5), num_blocks=7)
    batch = runner.lay_out(sequences, counts, [shared])
    assert isinstance(batch.attention.decode[None], CascadePlan)
    state = runner.forward.forward(batch.inputs, batch.attention)
    logits = runner.forward.logits(state, batch.last_tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_model_of_windows_alone_shares_no_prefixes(tmp_path: Path) -> None:
    runner = DevicePagedRunner(tiny_decoder("mistral", tmp_path), OPERATIONS, num_blocks=4)
    assert not runner.plans.can_share_prefixes


def test_plans_of_fewer_rows_work_in_the_memory_of_the_largest(tmp_path: Path) -> None:
    runner = DevicePagedRunner(tiny_decoder("qwen2_window", tmp_path), OPERATIONS, num_blocks=NUM_BLOCKS)
    lengths = torch.tensor([30, 1, 0], dtype=torch.int32)
    rows = DecodeRows(lengths, torch.zeros((3, 8), dtype=torch.int32))
    plans = runner.plans.decode(rows)
    assert set(plans) == {None, 21}
    largest = runner.plans.decode(
        DecodeRows(torch.zeros(MAX_ROWS, dtype=torch.int32), torch.zeros((MAX_ROWS, NUM_BLOCKS), dtype=torch.int32))
    )
    for window, plan in plans.items():
        assert isinstance(plan, DecodePlan)
        alone = empty_plan(rows, plan.shape, plan.config, plan.block_size, plan.num_programs, window)
        assert plan.work.shape == alone.work.shape
        assert plan.partial_out.shape == alone.partial_out.shape
        assert plan.num_arrived.shape == alone.num_arrived.shape
        assert plan.work.data_ptr() == largest[window].work.data_ptr()
        assert len(plan.work) < len(largest[window].work)
    assert plans[None].work.data_ptr() != plans[21].work.data_ptr()
    partials = {plan.partial_out.data_ptr() for plan in plans.values() if isinstance(plan, DecodePlan)}
    assert len(partials) == 1
    for _ in range(2):  # the plans follow what the rows' tensors hold
        runner.plans.fill(plans)
        for window, plan in plans.items():
            first = [0 if window is None else max(0, length - window) for length in lengths.tolist()]
            work = plan.work[: int(plan.num_work)].tolist()
            assert [sum(end - start for row, start, end, *_ in work if row == i) for i in range(3)] == [
                length - start for length, start in zip(lengths.tolist(), first, strict=True)
            ]
        lengths.copy_(torch.tensor([7, 128, 33]))


def test_gated_activations_are_known_by_every_name_that_the_decoder_knows() -> None:
    x = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "silu": F.silu,
    }
    for name in ACTIVATION_NAMES.values():
        expected = functions[name](x[:, :5]) * x[:, 5:]
        torch.testing.assert_close(OPERATIONS.gated_activation(x, name), expected)
