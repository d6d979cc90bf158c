"""Beam searches of one model as requests and as calls of `transformers`, side by side."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Unpack

import quire
from quire.params import GenerateParams
from scheduler_svc.core.beam_search import BeamSearchParams, Hypothesis
from tests.e2e.model_site import ModelSite
from tests.scheduler.beam_reference import BeamReport, compare_beams, reference_beams

BEAM_WIDTHS = (2, 4, 6)
LENGTH_PENALTIES = (0.6, 1.0, 1.4)
EARLY_STOPPING = (True, False, "never")


def _no_edits() -> GenerateParams:
    return {}


@dataclass(frozen=True, slots=True)
class Search:
    """One search; `edits` of its log-probabilities say to us what `options` say to `transformers`."""

    prompt: list[int]
    params: BeamSearchParams
    edits: GenerateParams = field(default_factory=_no_edits)
    options: dict[str, Any] = field(default_factory=dict)

    def request(self, model_eos: int) -> GenerateParams:
        """End-of-sequence tokens other than the model's own are stop tokens, which end a hypothesis as well."""
        params = self.params
        plain: GenerateParams = {
            "beam_width": params.beam_width,
            "n": params.num_return,
            "length_penalty": params.length_penalty,
            "early_stopping": params.early_stopping,
            "max_tokens": params.max_tokens,
            "ignore_eos": model_eos not in params.eos_token_ids,
            "stop_token_ids": sorted(params.eos_token_ids - {model_eos}),
        }
        return plain | self.edits


def search(prompt: list[int], beam_width: int, max_tokens: int, ends: Iterable[int], **fields: Any) -> Search:
    """One that returns all its beams, unless fields say otherwise."""
    shape = {"beam_width": beam_width, "num_return": beam_width, "max_tokens": max_tokens}
    return Search(prompt, BeamSearchParams(**{**shape, "eos_token_ids": frozenset(ends), **fields}))


def all_searches(prompt: list[int], ends: Sequence[int], max_tokens: int) -> list[Search]:
    """Every width with every penalty and way to stop."""
    return [
        search(prompt, width, max_tokens, ends, length_penalty=penalty, early_stopping=stopping)
        for width, penalty, stopping in product(BEAM_WIDTHS, LENGTH_PENALTIES, EARLY_STOPPING)
    ]


def some_searches(prompt: list[int], ends: Sequence[int], max_tokens: int) -> list[Search]:
    """Every width with every way to stop, and each penalty with each of both."""
    kinds = product(enumerate(BEAM_WIDTHS), enumerate(EARLY_STOPPING))
    return [
        search(prompt, width, max_tokens, ends, length_penalty=LENGTH_PENALTIES[(i + j) % 3], early_stopping=stopping)
        for (i, width), (j, stopping) in kinds
    ]


def smaller_searches(prompt: list[int], ends: Sequence[int], max_tokens: int) -> list[Search]:
    """Searches with fewer ends, and with fewer returned hypotheses."""
    fewer_ends = [search(prompt, width, max_tokens, ends[:num]) for width, num in product(BEAM_WIDTHS, (0, 1))]
    return fewer_ends + [search(prompt, 4, max_tokens, ends, num_return=num) for num in (1, 3)]


def edited_searches(model: Any, prompt: list[int], ends: Sequence[int], max_tokens: int) -> list[Search]:
    """Searches whose log-probabilities are edited, as processors of `transformers` edit them."""
    plain = search(prompt, 4, max_tokens, ends)
    unedited = reference_beams(model, prompt, plain.params)
    more, less, *_ = (token for token in unedited.token_ids[0] if token not in ends)
    too_short = min(map(len, unedited.token_ids))
    allowed = [token for token in range(model.config.vocab_size) if token not in (more, less)]
    edits: list[tuple[GenerateParams, dict[str, Any]]] = [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"min_tokens": too_short}, {"min_new_tokens": too_short}),
        ({"allowed_token_ids": allowed}, {"bad_words_ids": [[more], [less]]}),
        (
            {"min_tokens": too_short, "repetition_penalty": 1.2, "logit_bias": {more: 2.0, less: -3.0}},
            {"min_new_tokens": too_short, "repetition_penalty": 1.2, "sequence_bias": [[[more], 2.0], [[less], -3.0]]},
        ),
    ]
    searches = [replace(plain, edits=ours, options=theirs) for ours, theirs in edits]
    for each in searches:
        reference = reference_beams(model, prompt, each.params, **each.options)
        assert (reference.token_ids, reference.scores) != (unedited.token_ids, unedited.scores), each.options
    return searches


class Searches:
    """Searches of one model, and what `transformers` finds."""

    def __init__(self, site: ModelSite, searches: Sequence[Search]) -> None:
        self.all = list(searches)
        self._model_eos = site.eos_token_id
        self.references = [
            reference_beams(site.reference, each.prompt, each.params, **each.options) for each in searches
        ]

    async def run(self, client: quire.AsyncClient, index: int, **more: Unpack[GenerateParams]) -> quire.Completion:
        return await client.generate(self.all[index].prompt, **(self.request(index) | more))

    def request(self, index: int) -> GenerateParams:
        return self.all[index].request(self._model_eos)

    def compare(self, completions: Sequence[quire.Completion]) -> BeamReport:
        """Compare all searches, in their order. Raises AssertionError at the first that differs."""
        report = BeamReport()
        for reference, completion in zip(self.references, completions, strict=True):
            report += compare_beams(reference, hypotheses(completion))
        return report


def hypotheses(completion: quire.Completion) -> list[Hypothesis]:
    """A search's answer: samples best first, each with its end and its score."""
    found = []
    for index, sample in enumerate(completion.samples):
        assert (sample.index, sample.sample_index) == (index, 0)
        assert sample.score is not None
        assert sample.finish_reason in (quire.FinishReason.STOP, quire.FinishReason.LENGTH)
        is_end = sample.finish_reason is quire.FinishReason.STOP
        found.append(Hypothesis(sample.token_ids, sample.score, "eos" if is_end else "length"))
    assert completion.usage.completion_tokens == sum(len(each.token_ids) for each in found)
    return found
