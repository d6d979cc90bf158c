"""Beam search on a real model, in this process: what executes the steps of a pool whose requests are beams.

The model runs as the worker runs it, the search as the scheduler's. Prompts are documents of the demo model's kind that
it was not trained on, one behind another and cut to the length asked for; a search never ends before its length.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import fmean

import torch
from tokenizers import Tokenizer

from benchmarks.lengths import MAX_MODEL_LEN, Lengths
from benchmarks.memory.saturated_pool import MAX_BATCHED_TOKENS, PoolConfig, new_sequence
from common.sampling_params import SequenceSampling
from common.step import Candidates
from demo.stories import documents
from kernels.native.torch_kernels import TorchKernels
from scheduler_svc.core.beam_search import BeamSearch, BeamSearchParams, Candidate
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.workers.step_builder import build_step
from worker_svc.cpu.host_decoder import HostDecoder
from worker_svc.cpu.runner import CpuRunner
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.decoder import Decoder, load_decoder
from worker_svc.model.layers import Linear
from worker_svc.steps.step_limits import StepLimits

TEXT_SEED = 2_000_000  # neither that of training nor that of the held-out text


class DemoPrompts:
    """Token ids of demo documents, without end."""

    def __init__(self, model: Path, seed: int = TEXT_SEED) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._documents = documents(seed)

    def draw(self, num_tokens: int) -> list[int]:
        """Draw a prompt. It begins with a document; the rest of the last one is dropped."""
        token_ids: list[int] = []
        while len(token_ids) < num_tokens:
            token_ids += self._tokenizer.encode(next(self._documents), add_special_tokens=False).ids
        return token_ids[:num_tokens]


class BeamDecoding:
    """A model with a KV pool of its own, and the searches that run on it.

    `temperature` divides the model's logits: above 1 it is less sure of itself than it was trained to be.
    """

    def __init__(self, model: Path, beam_width: int, config: PoolConfig, *, temperature: float = 1.0) -> None:
        self._prompts = DemoPrompts(model)
        self._beam_width = beam_width
        self._searches: dict[SequenceGroup, BeamSearch] = {}
        self._ranks: dict[SequenceGroup, list[Sequence]] = {}  # live beams, best first
        self._candidates: dict[Sequence, list[Candidate]] = {}  # the latest of each beam
        self._sampling: dict[int, SequenceSampling] = {}
        self._num_apart = 0  # summed over the steps of all searches, see `mean_tokens_apart`
        self._num_steps = 0
        self._nats: list[float] = []  # of each finished search, see `nats_per_token`
        decoder = _flattened(load_decoder(model, torch.float32, torch.device("cpu")), temperature)
        assert decoder.config.max_model_len >= MAX_MODEL_LEN, "the model's context is shorter than the traces need"
        pool = KVPool(decoder.block_shape(config.block_size), config.num_blocks, decoder.device, config.num_blocks)
        limits = StepLimits(
            num_seats=config.max_num_seqs,
            num_blocks=config.num_blocks,
            num_host_blocks=config.num_blocks,
            block_size=config.block_size,
            vocab_size=decoder.config.vocab_size,
            max_model_len=MAX_MODEL_LEN,
            max_batched_tokens=MAX_BATCHED_TOKENS,
        )
        self._runner = CpuRunner(HostDecoder(decoder, TorchKernels()), pool, limits)

    @property
    def mean_tokens_apart(self) -> float:
        """Number of tokens since the live beams' last common one, mean over all steps of all searches."""
        return self._num_apart / self._num_steps

    @property
    def nats_per_token(self) -> float:
        """Uncertainty of the model: minus the mean log-probability of a token of the best answers."""
        return fmean(self._nats)

    def groups(self, lengths: Iterable[Lengths]) -> Iterator[SequenceGroup]:
        """Make a search for each; end-of-sequence tokens are ordinary tokens."""
        seq_ids = count()
        for arrival, each in enumerate(lengths):
            prompt = self._prompts.draw(each.num_input)
            beams = [new_sequence(next(seq_ids), prompt, each.num_output) for _ in range(self._beam_width)]
            params = BeamSearchParams(
                beam_width=self._beam_width, max_tokens=each.num_output, eos_token_ids=frozenset(), early_stopping=True
            )
            search = BeamSearch(params)
            group = SequenceGroup(beams, arrival=arrival, awaits_host=True, num_candidates=search.num_candidates)
            self._searches[group] = search
            self._ranks[group] = beams[:1]
            self._sampling.update((beam.seq_id, SequenceSampling(seed=0)) for beam in beams)
            yield group

    def execute(self, plan: StepPlan) -> list[int]:
        """Execute a step. Beams sample nothing; their candidates are kept."""
        result = self._runner.launch(build_step(plan, 1, self._sampling))
        for row, candidates in zip(plan.candidate_rows, result.candidates, strict=True):
            self._candidates[plan.sequences[row]] = _as_candidates(candidates)
        return list(result.token_ids)

    def decide(self, scheduler: Scheduler) -> None:
        """Decide the next beams of each search whose candidates are all known."""
        for group in dict.fromkeys(beam.group for beam in self._candidates):
            if group.awaits_decision:
                self._go_on(scheduler, group)

    def _go_on(self, scheduler: Scheduler, group: SequenceGroup) -> None:
        live, search = self._ranks[group], self._searches[group]
        survivors = search.advance([self._candidates.pop(beam) for beam in live])
        if survivors:
            self._num_apart += live[0].num_output_tokens + 1 - len(search.common_prefix())
            self._num_steps += 1
            chosen = [(live[survivor.parent], survivor.token_id) for survivor in survivors]
            self._ranks[group] = scheduler.replace_beams(group, chosen)
            return
        self._nats.append(-search.finish()[0].score)
        scheduler.finish_group(group)
        del self._searches[group], self._ranks[group]
        for beam in group.sequences:
            del self._sampling[beam.seq_id]


def _flattened(decoder: Decoder, temperature: float) -> Decoder:
    head = decoder.head
    assert isinstance(head, Linear), "a decoder that nobody packed"
    bias = None if head.bias is None else head.bias / temperature
    return replace(decoder, head=Linear(head.weight / temperature, bias))


def _as_candidates(candidates: Candidates) -> list[Candidate]:
    assert candidates.token_ids, "the model gave numbers that are not finite"
    return [Candidate(*pair) for pair in zip(candidates.token_ids, candidates.logprobs, strict=True)]
