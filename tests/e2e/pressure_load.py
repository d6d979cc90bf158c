"""Requests of every kind for a pool that is too small for them, and how sure the model is of what it answers.

What comes from a seed is the same in every run. Margins come from `transformers`, each output alone and unpadded;
it knows nothing of services.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

import quire
from benchmarks.lengths import Lengths
from kernels.sampling.noise import gumbel, noise_bits, row_keys
from quire.params import GenerateParams
from scheduler_svc.core.beam_search import BeamSearchParams
from tests.scheduler.beam_reference import reference_beams

MAX_BEAMS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request with a number of samples, or of beams."""

    prompt: tuple[int, ...]
    max_tokens: int
    num_samples: int = 1  # that are drawn; of beams, that come back
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    priority: int = 0
    logprobs: int | None = None

    def params(self) -> GenerateParams:
        """Build the SDK's parameters. Every output ends by its length, so that each seed draws as much as it should."""
        params = GenerateParams(
            max_tokens=self.max_tokens, temperature=self.temperature, n=self.num_samples, priority=self.priority
        )
        if self.logprobs is not None:
            params["logprobs"] = self.logprobs
        if self.frequency_penalty:
            params["frequency_penalty"] = self.frequency_penalty
        if self.beam_width is not None:
            params["beam"] = quire.BeamParams(
                beam_width=self.beam_width, length_penalty=self.length_penalty, early_stopping=self.early_stopping
            )
            return params
        params["ignore_eos"] = True
        params["seed"] = self.seed
        return params

    def num_worst_case_blocks(self, block_size: int) -> int:
        """Number of blocks that the request holds when nothing but the prompt is shared."""
        num_shared = len(self.prompt) // block_size
        num_own = -(-(len(self.prompt) + self.max_tokens) // block_size) - num_shared
        return num_shared + num_own * (self.beam_width or self.num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of the requests, in tokens."""

    vocab_size: int
    prefix_lengths: tuple[int, ...] = (21, 40, 64)  # of the prefixes that many share
    max_own_prompt: int = 24
    max_output: int = 32


def mixed_asks(seed: int, number: int, shape: Shape, lengths: Sequence[Lengths] = ()) -> list[Ask]:
    """Greedy, sampled, four samples and beams in equal parts; two of three begin with one of the shared prefixes.

    `lengths`, if given, of each request: prompts are cut or filled up to theirs.
    """
    rng = random.Random(seed)
    prefixes = [_tokens(rng, length, shape) for length in shape.prefix_lengths]
    prefixes += [()] * (len(prefixes) // 2)
    kinds = ["greedy", "sampled", "samples", "beams"] * -(-number // 4)
    rng.shuffle(kinds)
    asks = [_ask(rng, kind, rng.choice(prefixes), shape) for kind in kinds[:number]]
    return [_of_lengths(rng, ask, each, shape) for ask, each in zip(asks, lengths, strict=True)] if lengths else asks


def _ask(rng: random.Random, kind: str, prefix: tuple[int, ...], shape: Shape) -> Ask:
    common: dict[str, Any] = {
        "prompt": prefix + _tokens(rng, rng.randint(1, shape.max_own_prompt), shape),
        "max_tokens": rng.randint(2, shape.max_output),
        "priority": rng.choice([0, 0, 0, 1, 2]),
        "logprobs": rng.choice([None, None, 0, 2]),
    }
    if kind == "greedy":
        return Ask(**common)
    if kind == "beams":
        return Ask(
            **common,
            beam_width=MAX_BEAMS,
            num_samples=rng.randint(1, MAX_BEAMS),
            length_penalty=rng.choice([0.6, 1.0, 1.4]),
            early_stopping=rng.choice([True, False, "never"]),
        )
    return Ask(
        **common,
        num_samples=4 if kind == "samples" else 1,
        temperature=rng.choice([0.5, 0.75, 1.0]),  # exact in float32
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
        seed=rng.randrange(2**64),
    )


def _of_lengths(rng: random.Random, ask: Ask, lengths: Lengths, shape: Shape) -> Ask:
    filling = _tokens(rng, max(0, lengths.num_input - len(ask.prompt)), shape)
    return replace(ask, prompt=(ask.prompt + filling)[: lengths.num_input], max_tokens=lengths.num_output)


def _tokens(rng: random.Random, length: int, shape: Shape) -> tuple[int, ...]:
    return tuple(rng.randrange(3, shape.vocab_size) for _ in range(length))


class Margins:
    """Margins by which each token was ahead of the second best, by the model alone."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._eos_token_id = int(model.config.eos_token_id)

    def of_sample(self, ask: Ask, index: int, output: Sequence[int]) -> list[float]:
        """Margin of each token of a sample; negative if the model would have chosen another."""
        with torch.no_grad():
            logits = self._model(torch.tensor([[*ask.prompt, *output]])).logits[0, len(ask.prompt) - 1 : -1].double()
        tokens = torch.tensor(output)
        counts = torch.nn.functional.one_hot(tokens, logits.shape[1]).cumsum(0)
        logits[1:] -= ask.frequency_penalty * counts[:-1]
        if ask.temperature:
            positions = range(len(ask.prompt), len(ask.prompt) + len(output))
            keys = row_keys([ask.seed] * len(output), [index] * len(output), positions)
            noise = gumbel(noise_bits(keys[:, None], torch.arange(logits.shape[1], dtype=torch.int32)))
            logits = logits / ask.temperature + noise
        chosen = logits.gather(1, tokens[:, None])[:, 0]
        others = logits.scatter(1, tokens[:, None], -torch.inf).amax(1)
        margins: list[float] = (chosen - others).tolist()
        return margins

    def of_search(self, ask: Ask) -> float:
        """The smallest gap of scores that decided anything in the search: a nearer tie may part two right runs."""
        assert ask.beam_width is not None
        params = BeamSearchParams(
            beam_width=ask.beam_width,
            max_tokens=ask.max_tokens,
            eos_token_ids=frozenset({self._eos_token_id}),
            num_return=ask.num_samples,
            length_penalty=ask.length_penalty,
            early_stopping=ask.early_stopping,
        )
        return reference_beams(self._model, ask.prompt, params).margin
