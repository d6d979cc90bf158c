"""Beam search finds what `transformers` finds, over its own log-probabilities and over those of a plain loop.

Models are tiny random checkpoints of three families, with end-of-sequence ids that their own searches reach, and the
demo model with its own. One family has all combinations of parameters, each other model those of a third in which each
two values of two parameters meet.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from scheduler_svc.core.beam_search import BeamSearch, BeamSearchParams, Candidate, Hypothesis
from tests.scheduler.beam_reference import BeamReference, BeamReport, compare_beams, reference_beams
from tests.services import DEMO_MODEL
from tests.worker.tiny_models import random_prompts, write_tiny_model

BEAM_WIDTHS = (2, 4, 6)
LENGTH_PENALTIES = (0.6, 1.0, 1.4)
EARLY_STOPPING = (True, False, "never")
# Seed of the checkpoint, and two tokens that its best beams reach at several lengths: its end-of-sequence ids.
FAMILIES = {"opt": (4, 53, 206), "gpt2": (4, 25, 163), "llama_gqa": (3, 25, 202)}
FULL_FAMILY = "llama_gqa"
MAX_TOKENS = 16
FREE_MAX_TOKENS = 8  # without an end, when all three ways of early stopping are one
DEMO_MAX_TOKENS = 20
QUESTION = "<|bos|><|user|>Thank you!<|assistant|>"
STORY = "<|bos|>Lucy had a red ball."


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a prompt, and the end-of-sequence ids of which none, one or two count."""

    model: Any
    prompt: list[int]
    eos_token_ids: list[int]
    max_tokens: int
    has_all: bool  # of the combinations

    def all_params(self, num_eos: int) -> Iterator[tuple[BeamSearchParams, bool]]:
        """Yield all combinations; the flag marks the third in which each two values of two parameters meet."""
        for (i, width), (j, penalty), (k, stopping) in product(
            enumerate(BEAM_WIDTHS), enumerate(LENGTH_PENALTIES), enumerate(EARLY_STOPPING)
        ):
            params = BeamSearchParams(
                beam_width=width,
                num_return=width,
                max_tokens=self.max_tokens if num_eos else FREE_MAX_TOKENS,
                eos_token_ids=frozenset(self.eos_token_ids[:num_eos]),
                length_penalty=penalty,
                early_stopping=stopping,  # type: ignore[arg-type]  # a literal, beside booleans
            )
            yield params, (i + j + k) % 3 == 0


def load(folder: Path) -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module", params=[*FAMILIES, "demo"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    if request.param == "demo":
        model, tokenizer = load(DEMO_MODEL), Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
        prompt = tokenizer.encode(QUESTION, add_special_tokens=False).ids
        full_stop = tokenizer.encode("end.", add_special_tokens=False).ids[-1]
        return Case(model, prompt, [model.config.eos_token_id, full_stop], DEMO_MAX_TOKENS, has_all=False)
    seed, *eos_ids = FAMILIES[request.param]
    model = load(write_tiny_model(request.param, tmp_path_factory.mktemp(request.param), seed))
    prompt = random_prompts([9], seed=3)[0]
    return Case(model, prompt, eos_ids, MAX_TOKENS, has_all=request.param == FULL_FAMILY)


@pytest.fixture(scope="module")
def reports() -> Iterator[list[BeamReport]]:
    """One of each test; together they show that near ties are rare."""
    reports: list[BeamReport] = []
    yield reports
    sum(reports, BeamReport()).assert_cuts_are_rare()


def best_candidates(logprobs: torch.Tensor, num_candidates: int) -> list[list[Candidate]]:
    best = logprobs.topk(num_candidates)
    return [list(map(Candidate, *row)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def search_in_step(params: BeamSearchParams, reference: BeamReference) -> list[Hypothesis]:
    """Search over the very numbers that the reference saw, for exactly as many steps."""
    search, num_live = BeamSearch(params), 1
    for logprobs in reference.step_logprobs:
        assert num_live > 0, "the reference goes on"
        num_live = len(search.advance(best_candidates(logprobs[:num_live], search.num_candidates)))
    assert search.is_done, "the reference is done"
    assert all(search.common_prefix() == each.token_ids[: len(search.common_prefix())] for each in search.finish())
    return search.finish()


@torch.inference_mode()
def search_alone(model: Any, prompt: Sequence[int], params: BeamSearchParams) -> list[Hypothesis]:
    """Search over the log-probabilities of all live beams, each computed anew at every step."""
    search, beams = BeamSearch(params), [list(prompt)]
    while beams:
        logits = model(torch.tensor(beams), use_cache=False).logits[:, -1].float()
        survivors = search.advance(best_candidates(logits.log_softmax(dim=-1), search.num_candidates))
        beams = [[*beams[each.parent], each.token_id] for each in survivors]
    return search.finish()


@pytest.mark.parametrize("num_eos", [0, 1, 2])
def test_beams_are_those_of_transformers(case: Case, num_eos: int, reports: list[BeamReport]) -> None:
    report = BeamReport()
    lengths: dict[object, list[int]] = {}
    for params, is_sampled in case.all_params(num_eos):
        if not is_sampled and (num_eos == 0 or not case.has_all):  # without an end nothing stops early
            continue
        reference = reference_beams(case.model, case.prompt, params)
        in_step = search_in_step(params, reference)
        assert [each.token_ids for each in in_step] == reference.token_ids
        assert [each.score for each in in_step] == reference.scores  # to the last bit
        if is_sampled:
            report += compare_beams(reference, search_alone(case.model, case.prompt, params))
        lengths.setdefault(params.early_stopping, []).append(len(reference.step_logprobs))
    reports.append(report)
    assert report.num_searches == len(BEAM_WIDTHS) * len(LENGTH_PENALTIES)
    if num_eos == 0:
        assert report.num_ended == 0
    else:  # or the end was not put to the test
        assert report.num_ended > report.num_hypotheses / 4
        assert sum(lengths[True]) < sum(lengths[False]) < sum(lengths["never"])


@pytest.fixture(scope="module")
def demo() -> tuple[Any, list[int]]:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    return load(DEMO_MODEL), tokenizer.encode(STORY, add_special_tokens=False).ids


@pytest.mark.parametrize("num_return", [1, 3])
def test_the_n_best_are_the_first_of_all(demo: tuple[Any, list[int]], num_return: int) -> None:
    model, prompt = demo
    params = BeamSearchParams(beam_width=4, num_return=num_return, max_tokens=12, eos_token_ids=frozenset({19}))
    reference = reference_beams(model, prompt, params)
    found = search_in_step(params, reference)
    assert [each.token_ids for each in found] == reference.token_ids[:num_return]
    assert [each.score for each in found] == reference.scores[:num_return]


def test_forbidden_tokens_and_penalties_of_the_caller_are_kept(demo: tuple[Any, list[int]]) -> None:
    """Logits processors apply to log-probabilities, so candidates may be -inf and need not sum to one."""
    model, prompt = demo
    params = BeamSearchParams(beam_width=4, num_return=4, max_tokens=14, eos_token_ids=frozenset({19, 1}))
    reference = reference_beams(model, prompt, params, min_new_tokens=8, repetition_penalty=1.3)
    found = search_in_step(params, reference)
    assert [each.token_ids for each in found] == reference.token_ids
    assert [each.score for each in found] == reference.scores
    assert min(len(each.token_ids) for each in found) > 8
