"""Runners whose kernels are launched but not run, for who looks at the launches of their starts and steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Olmo2Config,
    Olmo2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kernels.attention.cascade_groups import SharingCost
from kernels.launches.launch_recorder import LaunchKey, RecordedLaunch
from worker_svc.gpu.graphs import GraphMaker, graph_sizes
from worker_svc.gpu.launch_compilation import record_start, recording_operations
from worker_svc.gpu.lone_rank import LoneRank
from worker_svc.gpu.quantised_products import QuantisedForm, quantising_maker
from worker_svc.gpu.runner import DeviceRunner
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.decoder import Decoder, load_decoder
from worker_svc.model.layers import Linear
from worker_svc.model.model_part import ModelPart
from worker_svc.steps.step_limits import StepLimits
from worker_svc.steps.trial_steps import num_trial_blocks

VOCAB_SIZE = 20_000  # so that rows of logits are split as their number says
MAX_MODEL_LEN = 128  # of the models
HOPPER = 90
NUM_SEATS = 70  # so that samples fall into all classes by which rows of logits are split
FREE = SharingCost(per_step=0, per_group=0, per_row=0)  # so that anything shared is worth it
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_MODEL_LEN,
}
_GATED: dict[str, Any] = {**_SHAPE, "intermediate_size": 112, "num_key_value_heads": 2}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    # One layer sees all keys, one a window.
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**_GATED, use_sliding_window=True, sliding_window=21, max_window_layers=1)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_GATED, head_dim=32)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**_GATED)),
    "opt": lambda: OPTForCausalLM(OPTConfig(**_SHAPE, ffn_dim=112)),
}


@dataclass(frozen=True, slots=True)
class LaunchCase:
    """A model in some dtype, with a cache in some dtype, and weights in some form.

    Of several ranks the last one's part, by itself: collectives are no launches of ours.
    """

    model: str
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None
    weights: QuantisedForm | None = None
    num_ranks: int = 1

    def decoder(self, folder: Path) -> Decoder:
        """Weights are random."""
        MODELS[self.model]().save_pretrained(folder)
        make_product = Linear if self.weights is None else quantising_maker(self.weights)
        part = ModelPart(self.num_ranks - 1, self.num_ranks)
        return load_decoder(folder, self.dtype, torch.device("cpu"), make_product, model_part=part)

    def runner(self, decoder: Decoder, limits: StepLimits, graphs: GraphMaker | None = None) -> DeviceRunner:
        return self._runner(decoder, self._pool(decoder, limits), limits, graphs)

    def _pool(self, decoder: Decoder, limits: StepLimits) -> KVPool:
        shape = decoder.block_shape(limits.block_size, self.kv_dtype)
        return KVPool(shape, limits.num_blocks, decoder.device, limits.num_host_blocks)

    def _runner(
        self, decoder: Decoder, pool: KVPool, limits: StepLimits, graphs: GraphMaker | None = None
    ) -> DeviceRunner:
        operations, sizes = recording_operations(), graph_sizes(limits.num_seats)
        ranks = None if self.num_ranks == 1 else LoneRank(self.num_ranks - 1, self.num_ranks)
        return DeviceRunner(decoder, pool, limits, operations, sizes, cost=FREE, graphs=graphs, ranks=ranks)

    def launches_of_start(self, decoder: Decoder) -> Mapping[LaunchKey, RecordedLaunch]:
        """Record the launches that a start on a GPU compiles, with a trial pool; the real one may shorten sequences."""
        trial = replace(LIMITS, num_host_blocks=0, max_model_len=MAX_MODEL_LEN)
        trial = replace(trial, num_blocks=num_trial_blocks(trial))
        pool = self._pool(decoder, trial)
        return record_start(partial(self._runner, decoder), pool, trial, HOPPER)


CASES = {
    "bf16": LaunchCase("qwen2", torch.bfloat16),
    "cache of e4m3": LaunchCase("qwen3", torch.bfloat16, torch.float8_e4m3fn),
    "fp16": LaunchCase("opt", torch.float16),
    "weights of e4m3": LaunchCase("qwen3", torch.bfloat16, weights="fp8"),
    "weights of 4 bits": LaunchCase("qwen2", torch.bfloat16, weights="int4"),
    "rank of two": LaunchCase("olmo2", torch.bfloat16, num_ranks=2),
}
LIMITS = StepLimits(
    num_seats=NUM_SEATS,
    num_blocks=64,
    num_host_blocks=16,
    block_size=16,
    vocab_size=VOCAB_SIZE,
    max_model_len=MAX_MODEL_LEN - 1,  # the table of tokens is a token wider, 16-byte aligned
    max_batched_tokens=200,
)
