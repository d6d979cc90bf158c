"""Requests for beam searches, and what they find over the scripted model.

That comes from `BeamSearch` driven without scheduler, worker or wire.
"""

from collections.abc import Sequence
from random import Random
from typing import Any, Literal

from quire.v1 import inference_pb2 as pb
from scheduler_svc.core.beam_search import BeamSearch, BeamSearchParams, Candidate, Hypothesis
from tests.scheduler import scripted_model as model
from tests.scheduler.journal_setup import until
from tests.scheduler.sample_outputs import RequestSeen, sampled
from tests.scheduler.serving_site import Site, counting


class ScriptedSearch:
    """One search behind a prompt that ends with `start`, step by step."""

    def __init__(
        self, start: int, params: BeamSearchParams, *, allowed: Sequence[int] = (), min_tokens: int = 0
    ) -> None:
        self.search = BeamSearch(params)
        self._params = params
        self._allowed = allowed
        self._min_tokens = min_tokens
        self._last = [start]  # of each live beam
        self.num_steps = 0

    def step(self) -> None:
        """Extend all live beams once."""
        held_back = sorted(self._params.eos_token_ids) if self.num_steps < self._min_tokens else []
        survivors = self.search.advance([self._candidates(last, held_back) for last in self._last])
        self._last = [each.token_id for each in survivors]
        self.num_steps += 1

    def run(self, num_steps: int | None = None) -> BeamSearch:
        """Run to the end, or for this many steps."""
        while not self.search.is_done and (num_steps is None or self.num_steps < num_steps):
            self.step()
        return self.search

    def _candidates(self, last: int, held_back: Sequence[int]) -> list[Candidate]:
        tokens = model.candidates(last, self.search.num_candidates, allowed=self._allowed, held_back=held_back)
        logprobs = model.candidate_logprobs(last, tokens, allowed=self._allowed, held_back=held_back)
        return [Candidate(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)]


def searching(
    start: int, max_tokens: int, beam_width: int, request_id: str = "", n: int | None = None, **beam: Any
) -> pb.GenerateRequest:
    """Build a beam search. It returns `beam_width` hypotheses unless `n` says otherwise."""
    request = counting(start, max_tokens, request_id, beam=pb.BeamParams(beam_width=beam_width, **beam))
    request.sampling.n = n or beam_width
    return request


def of_kind(kind: int, start: int, max_tokens: int, request_id: str, random_: Random) -> pb.GenerateRequest:
    """One sample, several, ranked ones, a search, and one that returns a part: kinds 0 to 4, of random widths."""
    match kind:
        case 0:
            return counting(start, max_tokens, request_id)
        case 1:
            return sampled(start, max_tokens, random_.randrange(2, 6), request_id)
        case 2:
            return sampled(start, max_tokens, 2, request_id, best_of=random_.randrange(3, 6))
        case 3:
            return searching(start, max_tokens, random_.randrange(2, 6), request_id)
        case _:
            return searching(start, max_tokens, 4, request_id, n=2, early_stopping=pb.EARLY_STOPPING_NEVER)


def search_of(request: pb.GenerateRequest) -> ScriptedSearch:
    early: dict[int, bool | Literal["never"]] = {pb.EARLY_STOPPING_TRUE: True, pb.EARLY_STOPPING_NEVER: "never"}
    params = BeamSearchParams(
        beam_width=request.beam.beam_width,
        max_tokens=request.stopping.max_tokens,
        eos_token_ids=frozenset(() if request.stopping.ignore_eos else (model.EOS,))
        | {*request.stopping.stop_token_ids},
        num_return=request.sampling.n,
        length_penalty=request.beam.length_penalty if request.beam.HasField("length_penalty") else 1.0,
        early_stopping=early.get(request.beam.early_stopping, False),
    )
    return ScriptedSearch(
        request.token_ids.ids[-1],
        params,
        allowed=request.sampling.allowed_token_ids,
        min_tokens=request.stopping.min_tokens,
    )


def expected(request: pb.GenerateRequest, num_steps: int | None = None) -> list[Hypothesis]:
    """Hypotheses that are returned at the end, or when the search is cut short after `num_steps`."""
    return search_of(request).run(num_steps).finish()


def tokens_of(hypotheses: Sequence[Hypothesis]) -> list[list[int]]:
    return [list(each.token_ids) for each in hypotheses]


def assert_found(seen: RequestSeen, request: pb.GenerateRequest) -> None:
    hypotheses = expected(request)
    assert seen.error is None
    assert seen.token_ids == tokens_of(hypotheses)
    for sample, hypothesis in zip(seen.samples, hypotheses, strict=True):
        assert sample.finish is not None
        assert sample.finish.HasField("score") and sample.finish.score == hypothesis.score
        assert sample.finish.sample_index == 0
        if hypothesis.finish == "eos":
            last = hypothesis.token_ids[-1]
            cause = "eos_token_id" if last == model.EOS else "stop_token_id"
            assert sample.reason == pb.FINISH_REASON_STOP and sample.finish.WhichOneof("cause") == cause
            assert getattr(sample.finish, cause) == last
        else:
            assert sample.reason == pb.FINISH_REASON_LENGTH and sample.finish.WhichOneof("cause") is None


async def until_steps(site: Site, request_id: str, num_steps: int) -> None:
    """Wait until the search has taken this many steps, and all of them are durable."""
    live = site.engine.live
    await until(lambda: request_id in live and _num_steps(site, request_id) == num_steps)
    await until(lambda: not site.journal.stats.pending)


def _num_steps(site: Site, request_id: str) -> int:
    beams = site.engine.live[request_id].beams
    assert beams is not None
    return beams.num_steps
