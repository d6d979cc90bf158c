"""A runner with a real decoder and a small poisoned pool, for the worker's tests."""

from torch import Tensor

from tests.worker.paged_runner import PagedSequence, forward_batch
from tests.worker.tiny_models import MAX_POSITIONS
from worker_svc.kv_pool import KVPool
from worker_svc.model.decoder import Decoder
from worker_svc.runner import ModelRunner
from worker_svc.sampler import Sampler
from worker_svc.step_limits import StepLimits

NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE, NUM_SLOTS = 96, 32, 4, 12


def make_runner(decoder: Decoder, **options: int) -> tuple[ModelRunner, KVPool]:
    """A runner whose pool is NaN wherever nothing was written."""
    pool = KVPool(decoder.block_shape(BLOCK_SIZE), NUM_BLOCKS, decoder.device, NUM_HOST_BLOCKS)
    pool.blocks.fill_(float("nan"))
    pool.host_blocks.fill_(float("nan"))
    limits = StepLimits(
        num_slots=NUM_SLOTS,
        num_blocks=NUM_BLOCKS,
        num_host_blocks=NUM_HOST_BLOCKS,
        block_size=BLOCK_SIZE,
        vocab_size=decoder.config.vocab_size,
        max_model_len=MAX_POSITIONS,
        max_batched_tokens=256,
    )
    return ModelRunner(decoder, pool, Sampler(), limits, **options), pool


def full_logits(decoder: Decoder, token_ids: list[int]) -> Tensor:
    """The logits at every position, computed in one pass."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    sequence = PagedSequence(token_ids, len(token_ids), list(range(num_blocks)))
    batch = forward_batch([sequence], [len(token_ids)], BLOCK_SIZE, all_logits=True)
    return decoder.forward(batch, KVPool(decoder.block_shape(BLOCK_SIZE), num_blocks, decoder.device))
