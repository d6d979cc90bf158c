"""Whole steps whose kernels are launched but not run, for who looks at the launches: runners, starts, random steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import (
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from common.sampling_params import SequenceSampling
from common.step import SequenceState, Step
from kernels.attention.cascade_groups import SharingCost
from kernels.launches.launch_recorder import LaunchKey, RecordedLaunch
from tests.worker.steps import seat_state
from worker_svc.gpu.graphs import graph_sizes
from worker_svc.gpu.launch_compilation import record_start, recording_operations
from worker_svc.gpu.runner import DeviceRunner
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.decoder import Decoder, load_decoder
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
    "opt": lambda: OPTForCausalLM(OPTConfig(**_SHAPE, ffn_dim=112)),
}


@dataclass(frozen=True, slots=True)
class LaunchCase:
    """A model in some dtype, with a cache in some dtype."""

    model: str
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None

    def decoder(self, folder: Path) -> Decoder:
        """Weights are random."""
        MODELS[self.model]().save_pretrained(folder)
        return load_decoder(folder, self.dtype, torch.device("cpu"))

    def runner(self, decoder: Decoder, limits: StepLimits) -> DeviceRunner:
        return self._runner(decoder, self._pool(decoder, limits), limits)

    def _pool(self, decoder: Decoder, limits: StepLimits) -> KVPool:
        shape = decoder.block_shape(limits.block_size, self.kv_dtype)
        return KVPool(shape, limits.num_blocks, decoder.device, limits.num_host_blocks)

    def _runner(self, decoder: Decoder, pool: KVPool, limits: StepLimits) -> DeviceRunner:
        return DeviceRunner(decoder, pool, limits, recording_operations(), graph_sizes(limits.num_seats), cost=FREE)

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


@dataclass(frozen=True, slots=True)
class RandomSteps:
    """Each replaces all seats, so that any step may follow any other."""

    random: Random
    limits: StepLimits

    def step(self, step_id: int) -> Step:
        """Prompts, chunks of them, decode rows that may begin alike, and what else a step has."""
        random, limits = self.random, self.limits
        num_rows = round(limits.num_seats ** random.random())
        share_prompts = random.choice([0, 0, 0.3, 1])
        budget = limits.max_batched_tokens
        whole, rows, num_tokens, ended = [], [], [], []
        for row, seat in enumerate(random.sample(range(limits.num_seats), num_rows)):
            room = budget - (num_rows - row - 1)
            count = random.randint(1, min(room, 60)) if random.random() < share_prompts else 1
            unseen = random.choice([0, 0, 5]) if count > 1 else 0  # of a prompt, left for later steps
            whole.append(self._state(seat, count, unseen))
            rows.append(seat)
            num_tokens.append(count)
            budget -= count
            if not unseen:
                ended.append(row)
        ranked = [row for row in ended if random.random() < random.choice([0, 0, 0.5])]
        samples = [number for row in ended if row not in ranked for number in (row, rows[row])]
        step = Step(epoch=0, step_id=step_id, snapshot=True, whole=whole, rows=rows, num_tokens=num_tokens)
        step.samples = samples
        step.candidates = [number for row in ranked for number in (row, random.randint(1, 8))]
        step.copies = self._pairs(limits.num_blocks, limits.num_blocks)
        step.swap_out = self._pairs(limits.num_blocks, limits.num_host_blocks)
        step.swap_in = self._pairs(limits.num_host_blocks, limits.num_blocks)
        return step

    def _state(self, seat: int, count: int, unseen: int) -> SequenceState:
        random, limits = self.random, self.limits
        position = random.choice([0, 0, random.randint(0, limits.max_model_len - count - unseen)])
        if count == 1:
            position = random.randint(1, limits.max_model_len - 1)
        known = position + count + unseen
        num_blocks = -(-known // limits.block_size)
        num_shared = random.choice([0, num_blocks, num_blocks // 2])
        table = [*range(num_shared), *random.sample(range(8, limits.num_blocks), num_blocks - num_shared)]
        return seat_state(
            seat,
            self._tokens(count + unseen),
            table,
            position=position,
            history=self._tokens(position),
            num_prompt_tokens=known if count > 1 else position,
            sampling=self._sampling(count),
        )

    def _sampling(self, count: int) -> SequenceSampling:
        random = self.random
        if random.random() < 0.4:
            return SequenceSampling(seed=0, temperature=0.0)
        return SequenceSampling(
            seed=random.randint(0, 99),
            temperature=random.choice([0.0, 0.5, 1.0]),
            top_k=random.choice([None, 1, 40]),
            top_p=random.choice([1.0, 0.9]),
            min_p=random.choice([0.0, 0.05]),
            repetition_penalty=random.choice([1.0, 1.0, 1.2]),
            frequency_penalty=random.choice([0.0, 0.0, 0.1]),
            num_logprobs=random.choice([None, None, 3]),
            num_prompt_logprobs=random.choice([None, 2]) if count > 1 else None,
            logit_bias=random.choice([(), ((5, 1.0),)]),
            suppressed_token_ids=random.choice([(), (7,)]),
            suppressed_until=1000,
            allowed_token_ids=random.choice([None, None, (1, 2, 3)]),
        )

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.limits.vocab_size) for _ in range(count)]

    def _pairs(self, num_sources: int, num_destinations: int) -> list[int]:
        num_pairs = self.random.choice([0, 0, 1, 5])
        destinations = self.random.sample(range(num_destinations), num_pairs)
        return [number for each in destinations for number in (self.random.randrange(num_sources), each)]
