"""Requests of every kind, and what a model answers each of them alone, with how sure it was.

The answers come from the model's logits over whole contexts: nothing of blocks, steps or sampling in batches.
"""

import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from common.sampling_params import SequenceSampling
from kernels.sampling.noise import gumbel, noise_bits, row_keys
from scheduler_svc.core.beam_search import BeamSearch, BeamSearchParams, Candidate
from tests.worker.paged_runner import PagedSequence, forward_batch, reference_logits
from tests.worker.tiny_models import VOCAB_SIZE, random_prompts
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.decoder import Decoder

EOS_TOKEN_ID = 2
SHARED_PREFIX = random_prompts([13], seed=77)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`num_sequences` samples, or beams."""

    prompt: tuple[int, ...]
    max_tokens: int
    num_sequences: int = 1
    beams: BeamSearchParams | None = None
    temperature: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    priority: int = 0

    def sampling(self, index: int) -> SequenceSampling:
        return SequenceSampling(
            seed=self.seed,
            sample_index=index,
            temperature=self.temperature,
            frequency_penalty=self.frequency_penalty,
        )

    def num_worst_case_blocks(self, block_size: int) -> int:
        num_shared = len(self.prompt) // block_size
        num_own = -(-(len(self.prompt) + self.max_tokens) // block_size) - num_shared
        return num_shared + num_own * self.num_sequences


@dataclass(frozen=True, slots=True)
class Answer:
    """One output, and for each of its tokens how far that was ahead of the second best."""

    token_ids: list[int]
    margins: list[float]
    score: float | None = None  # of beams


def random_request(rng: random.Random) -> Request:
    """Greedy, sampled, four samples or a beam of two to four; half of them begin with the shared prefix."""
    head = SHARED_PREFIX[: rng.choice([0, 0, 5, 8, 13])]
    prompt = (*head, *(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 6))))
    kind = rng.choice(["greedy", "sampled", "samples", "beams"])
    max_tokens, priority = rng.randrange(2, 13), rng.choice([0, 0, 0, 1])
    if kind == "greedy":
        return Request(prompt=prompt, max_tokens=max_tokens, priority=priority)
    if kind == "beams":
        width = rng.randrange(2, 5)
        beams = BeamSearchParams(
            beam_width=width,
            max_tokens=max_tokens,
            eos_token_ids=frozenset({EOS_TOKEN_ID}) if rng.random() < 0.5 else frozenset(),
            num_return=rng.randint(1, width),
        )
        return Request(prompt=prompt, max_tokens=max_tokens, num_sequences=width, beams=beams, priority=priority)
    return Request(
        prompt=prompt,
        max_tokens=max_tokens,
        num_sequences=4 if kind == "samples" else 1,
        temperature=rng.choice([0.75, 1.0, 1.5]),  # exact in float32
        frequency_penalty=rng.choice([0.0, 0.0, 1.5]),
        seed=rng.randrange(2**40),
        priority=priority,
    )


class Reference:
    """Answers one request at a time."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def answers(self, request: Request) -> list[Answer]:
        if request.beams is not None:
            return self._search(request, request.beams)
        return [self._sample(request, index) for index in range(request.num_sequences)]

    def _sample(self, request: Request, index: int) -> Answer:
        answer = Answer([], [])
        for _ in range(request.max_tokens):
            logits = self._next_logits([*request.prompt, *answer.token_ids]).double()
            for token_id, count in Counter(answer.token_ids).items():
                logits[token_id] -= request.frequency_penalty * count
            if request.temperature:
                position = len(request.prompt) + len(answer.token_ids)
                keys = row_keys([request.seed], [index], [position])
                noise = gumbel(noise_bits(keys[:, None], torch.arange(len(logits), dtype=torch.int32)))
                logits = logits / request.temperature + noise[0]
            best = logits.topk(2)
            answer.token_ids.append(int(best.indices[0]))
            answer.margins.append(float(best.values[0] - best.values[1]))
        return answer

    def _search(self, request: Request, params: BeamSearchParams) -> list[Answer]:
        """The margin of every token of every answer is the smallest of the whole search."""
        search = BeamSearch(params)
        beams: list[tuple[float, list[int]]] = [(0.0, [])]
        margin = 1.0
        while beams:
            logprobs = [self._next_logits([*request.prompt, *output]).log_softmax(-1) for _, output in beams]
            best = [each.topk(search.num_candidates) for each in logprobs]
            candidates = [
                [Candidate(t, p) for t, p in zip(each.indices.tolist(), each.values.tolist(), strict=True)]
                for each in best
            ]
            margin = min(margin, _smallest_gap([score for score, _ in beams], logprobs, search.num_candidates))
            survivors = search.advance(candidates)
            beams = [(one.score, [*beams[one.parent][1], one.token_id]) for one in survivors]
        found = search.finish()
        gaps = [abs(a.score - b.score) for a, b in pairwise(found)]
        margin = min([margin, *gaps])
        return [Answer(list(one.token_ids), [margin] * len(one.token_ids), one.score) for one in found]

    def _next_logits(self, token_ids: list[int]) -> Tensor:
        """[vocab_size], computed from the whole context in one pass."""
        return self._forward(token_ids)[0]

    def kv(self, token_ids: list[int], block_size: int) -> Tensor:
        """The KV of a context, [num_blocks, ...], where the last block may be filled in part only."""
        pool = self._pool(len(token_ids), block_size)
        self._forward(token_ids, pool)
        return pool.blocks

    def _forward(self, token_ids: list[int], pool: KVPool | None = None) -> Tensor:
        pool = pool or self._pool(len(token_ids), 16)
        sequence = PagedSequence(token_ids, len(token_ids), list(range(pool.num_blocks)))
        with torch.inference_mode():
            return reference_logits(self._decoder, forward_batch([sequence], [len(token_ids)], pool.block_size), pool)

    def _pool(self, num_tokens: int, block_size: int) -> KVPool:
        return KVPool(self._decoder.block_shape(block_size), -(-num_tokens // block_size), self._decoder.device)


def _smallest_gap(scores: list[float], logprobs: list[Tensor], num_best: int) -> float:
    """Smallest gap between neighbours among the best continuations of all beams."""
    totals = torch.cat([score + each for score, each in zip(scores, logprobs, strict=True)])
    best = totals.topk(num_best + 1).values
    return float((best[:-1] - best[1:]).min())
