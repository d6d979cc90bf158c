"""Small models end to end: the accelerator's forward pass computed with kernels, against the torch references."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.attention.cascade_groups import SharedPrefix
from kernels.attention.cascade_reference import CascadePlan
from tests.kernels.on_device.devices import DEVICE, HAS_GPU, IN_E4M3
from tests.worker.device.device_paged_runner import DevicePagedRunner
from tests.worker.paged_runner import PagedSequence
from tests.worker.tiny_models import TINY_MODELS, random_prompts, write_tiny_model
from worker_svc.gpu import torch_operations, triton_operations
from worker_svc.model.decoder import Decoder, load_decoder
from worker_svc.operations import Operations

BUNDLES = (torch_operations.OPERATIONS, triton_operations.OPERATIONS)
MODELS = list(TINY_MODELS) if HAS_GPU else ["llama_gqa", "opt", "olmo2"]  # the interpreter is slow
gpu_only = pytest.mark.skipif(not HAS_GPU, reason="only a GPU shows it")


def tiny_decoder(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(write_tiny_model(name, folder), dtype, DEVICE)


def runner_of(
    decoder: Decoder, operations: Operations, kv_dtype: torch.dtype | None = None, block_size: int = 16
) -> DevicePagedRunner:
    return DevicePagedRunner(decoder, operations, num_blocks=8, block_size=block_size, kv_dtype=kv_dtype)


def steps(runner: DevicePagedRunner, prompts: Sequence[list[int]]) -> list[Tensor]:
    """Logits: of a whole prompt, then of one token at a time beside chunks of another prompt."""
    sequences = [PagedSequence(list(prompt), len(prompt)) for prompt in prompts]
    return [runner.step(sequences[:1], 30), *(runner.step(sequences, 4) for _ in range(2))]


@pytest.mark.parametrize("name", MODELS)
def test_kernels_and_references_give_the_same_logits_and_cache(name: str, tmp_path: Path) -> None:
    decoder = tiny_decoder(name, tmp_path)
    expected, ours = (runner_of(decoder, operations, block_size=8) for operations in BUNDLES)
    prompts = random_prompts((9, 6))
    for step, expected_step in zip(steps(ours, prompts), steps(expected, prompts), strict=True):
        assert (step - expected_step).abs().max() <= 3e-4 * expected_step.std()
    torch.testing.assert_close(ours.pool.blocks, expected.pool.blocks, rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("name", ["qwen3", "llama_biases", "llama_linear_rope", "llama3_rope", "llama_yarn"])
def test_rotary_frequencies_are_the_cpus_on_every_device(name: str, tmp_path: Path) -> None:
    decoder = tiny_decoder(name, tmp_path)
    expected = load_decoder(tmp_path, torch.float32, torch.device("cpu"))
    assert decoder.inverse_frequencies is not None and expected.inverse_frequencies is not None
    assert decoder.inverse_frequencies.device.type == DEVICE.type
    assert torch.equal(decoder.inverse_frequencies.cpu(), expected.inverse_frequencies)


def test_rows_that_share_blocks_are_attended_together_with_the_same_result(tmp_path: Path) -> None:
    decoder = tiny_decoder("llama_gqa", tmp_path)
    expected, ours = (DevicePagedRunner(decoder, operations, num_blocks=20, block_size=8) for operations in BUNDLES)
    sequences = expected.sharing_sequences(num_sharers=3, num_shared_blocks=3)
    ours.pool.blocks.copy_(expected.pool.blocks)
    counts = [1] * len(sequences)
    batch = ours.lay_out(sequences, counts, [SharedPrefix(rows=(0, 1, 2), num_blocks=3)])
    assert isinstance(batch.attention.decode[None], CascadePlan)
    logits = ours.forward.logits(ours.forward.forward(batch.inputs, batch.attention), batch.last_tokens)
    torch.testing.assert_close(logits, expected.compute(sequences, counts), rtol=1e-4, atol=1e-4)


@gpu_only
@pytest.mark.parametrize("kv_dtype", [None, IN_E4M3], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama_gqa", "opt", "qwen3", "mistral"])
def test_half_precision_is_as_good_as_that_of_the_references(
    name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    sequence = PagedSequence(random_prompts((40,))[0], 40, block_table=[3, 0, 2])
    exact = runner_of(tiny_decoder(name, tmp_path), BUNDLES[0]).compute([sequence], [40])
    decoder = tiny_decoder(name, tmp_path, dtype)
    theirs, ours = (runner_of(decoder, operations, kv_dtype).compute([sequence], [40]) for operations in BUNDLES)
    epsilon = torch.finfo(dtype).eps * exact.abs().max()
    assert (ours - exact).abs().mean() <= 2 * (theirs - exact).abs().mean() + epsilon


@gpu_only
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", ["llama_gqa", "opt", "qwen2_window"])
def test_a_captured_decode_pass_follows_what_its_inputs_hold_by_then_and_waits_for_nothing(
    name: str, tmp_path: Path
) -> None:
    runner = runner_of(tiny_decoder(name, tmp_path, torch.bfloat16), BUNDLES[1])
    sequences = [PagedSequence(prompt, len(prompt)) for prompt in random_prompts((17, 22))]
    runner.step(sequences, 30)
    runner.step(sequences, 30)
    batch = runner.lay_out(sequences, [1, 1])

    def run() -> Tensor:
        runner.plans.fill(batch.attention.decode)
        return runner.forward.logits(runner.forward.forward(batch.inputs, batch.attention), None)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run()
    for _ in range(3):
        wanted = runner.compute(sequences, [1, 1])
        now = runner.lay_out(sequences, [1, 1]).inputs
        for kept, new in (
            (batch.inputs.token_ids, now.token_ids),
            (batch.inputs.positions, now.positions),
            (batch.inputs.slot_mapping, now.slot_mapping),
            (batch.inputs.context_lens, now.context_lens),
            (batch.inputs.block_tables, now.block_tables),
        ):
            kept.copy_(new)
        graph.replay()
        torch.testing.assert_close(logits[:2].float(), wanted, rtol=0.02, atol=0.02 * float(wanted.std()))
        runner.step(sequences, 1)
