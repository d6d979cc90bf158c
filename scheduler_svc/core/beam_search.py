"""Beam search as `transformers` 5 does it: which beams live on, which hypotheses end, and when the search is over.

Pure arithmetic on tokens and log-probabilities, the same for the same candidates, so that a replay decides alike. It
knows nothing of blocks, sequences, workers or text: the caller computes the candidates of each live beam and forks or
frees sequences as the survivors say.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from ctypes import c_float
from dataclasses import dataclass, field
from heapq import merge
from operator import attrgetter, itemgetter
from typing import Literal

# Bound of |ln(length ** length_penalty)|, well inside float32: ln(3.4e38) is 88.7.
_MAX_LOG_NORM = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a search. Raises ValueError that says what to change."""

    beam_width: int  # `num_beams`; at least 2: with one beam, `transformers` decodes greedily
    max_tokens: int  # bound of output tokens, the end-of-sequence token included
    eos_token_ids: frozenset[int]  # empty for ignore_eos
    num_return: int = 1  # the n best
    length_penalty: float = 1.0  # a hypothesis scores: sum of its log-probabilities / num_tokens ** length_penalty
    # With beam_width hypotheses finished, True ends the search. Otherwise it continues while the best live beam would
    # beat the worst of them: False scores that beam at its present length; "never" at max_tokens, where a positive
    # length penalty makes it look best.
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if self.beam_width < 2:
            raise ValueError(f"beam_width is {self.beam_width}: give at least 2, or decode greedily")
        if not 1 <= self.num_return <= self.beam_width:
            raise ValueError(f"num_return is {self.num_return}: give 1 to {self.beam_width}, the beam_width")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}: give at least 1")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f'early_stopping is {self.early_stopping!r}: give True, False or "never"')
        if not abs(self.length_penalty) * math.log(self.max_tokens) <= _MAX_LOG_NORM:  # nor when it is NaN
            raise ValueError(
                f"length_penalty is {self.length_penalty}: give a number such that max_tokens ** length_penalty "
                "is between 1e-26 and 1e26"
            )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible next token of a live beam, after all logits processors; -inf for a forbidden one."""

    token_id: int
    logprob: float
    details: object = None  # the caller's own, kept with the token


@dataclass(frozen=True, slots=True)
class Survivor:
    """A beam that lives on."""

    parent: int  # index among the live beams before the step
    token_id: int
    score: float  # cumulative log-probability


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An answer."""

    token_ids: tuple[int, ...]  # output only, the end-of-sequence token included
    score: float  # `sequences_scores` of `transformers`
    finish: Literal["eos", "length"] | None  # None: cut short, as the search was ended from outside
    details: tuple[object, ...] = field(default=(), compare=False)  # of its candidates, beside token_ids


@dataclass(frozen=True, slots=True)
class _Beam:
    token_ids: list[int]  # its own: it grows with the last child to take it over, the other children copy it
    details: list[object]  # likewise
    score: float  # cumulative log-probability


_Ranked = tuple[float, int, Candidate]  # cumulative score, parent, candidate


class BeamSearch:
    """One request's search: call `advance` once per step until it returns no survivor, then `finish`.

    Scores are rounded to float32 after each operation, as the reference computes them. Among equal scores, where the
    reference leaves the order open, the earlier beam comes first, then its earlier candidate.
    """

    def __init__(self, params: BeamSearchParams) -> None:
        self._params = params
        self._live = [_Beam([], [], 0.0)]  # best first; the prompt, before the first step; empty once done
        self._finished: list[Hypothesis] = []  # best first, at most beam_width: more are never returned
        self._num_steps = 0  # = the number of output tokens of each live beam
        self._common_prefix: list[int] = []

    @property
    def num_candidates(self) -> int:
        """Number of candidates of each live beam that `advance` needs; fewer only if no more tokens are allowed.

        The reference ranks the best `max(2, 1 + num_eos) * beam_width` of all beams together. Of those it uses the
        first beam_width that do not end, and the ending ones among the first beam_width: none of either is beyond
        rank beam_width + num_eos within its own beam.
        """
        return self._params.beam_width + len(self._params.eos_token_ids)

    @property
    def is_done(self) -> bool:
        """True once no beam is live."""
        return not self._live

    @property
    def num_live(self) -> int:
        """Live beams; before the first step one, the prompt."""
        return len(self._live)

    def live_outputs(self) -> list[list[int]]:
        """The output tokens of each live beam, best first."""
        return [list(beam.token_ids) for beam in self._live]

    def contenders(
        self, token_ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]
    ) -> Sequence[Sequence[int]]:
        """Return for each live beam the places of the candidates, most likely first, that the next step depends on.

        `advance` decides the same with these alone, and they are few: no more than twice beam_width.
        """
        width, eos_token_ids = self._params.beam_width, self._params.eos_token_ids
        places: list[list[int]] = [[] for _ in self._live]
        num_open = 0
        for rank, (_, parent, place) in enumerate(self._by_score(logprobs)):
            is_end = token_ids[parent][place] in eos_token_ids
            if is_end and rank >= width:
                continue
            places[parent].append(place)
            num_open += not is_end
            if num_open == width:
                break
        return places

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> list[Survivor]:
        """Take one step of all live beams. Return the new ones, best first, at most beam_width; none when done.

        candidates[i] are those of the i-th survivor of the last step; in the first step there is one beam, the prompt.
        """
        assert self._live, "the search is done"
        assert len(candidates) == len(self._live), "one list of candidates for each live beam"
        width, eos_token_ids = self._params.beam_width, self._params.eos_token_ids
        self._num_steps += 1
        is_last = self._num_steps == self._params.max_tokens
        ranked = self._ranked(candidates)
        # An ending candidate outside the first beam_width neither finishes nor lives on.
        self._add_finished([each for each in ranked[:width] if is_last or each[2].token_id in eos_token_ids])
        open_ones = [] if is_last else [each for each in ranked if each[2].token_id not in eos_token_ids][:width]
        if open_ones and self._cannot_improve(open_ones[0][0]):
            open_ones = []
        self._live = self._grown(open_ones)
        self._extend_common_prefix()
        return [Survivor(parent, candidate.token_id, score) for score, parent, candidate in open_ones]

    def finish(self) -> list[Hypothesis]:
        """Return the num_return best hypotheses, best first.

        Before the search is done, live beams count as hypotheses of their present length: the best so far, none
        before the first step. Fewer than asked for also if fewer sequences were allowed.
        """
        cut_short = [
            Hypothesis(tuple(beam.token_ids), self._normalised(beam.score, self._num_steps), None, tuple(beam.details))
            for beam in self._live
            if beam.token_ids
        ]
        return _best_first([*self._finished, *cut_short])[: self._params.num_return]

    def common_prefix(self, start: int = 0) -> tuple[int, ...]:
        """Return the tokens from `start` on that all hypotheses which `finish` may yet return share; they only grow."""
        return tuple(self._common_prefix[start:])

    def common_details(self, start: int = 0) -> tuple[object, ...]:
        """Return the details of the tokens of `common_prefix`."""
        anyone = self._live[0].details if self._live else self._finished[0].details if self._finished else ()
        return tuple(anyone[start : len(self._common_prefix)])

    def _by_score(self, logprobs: Sequence[Sequence[float]]) -> Iterator[tuple[float, int, int]]:
        """Iterate over (cumulative score, parent, place) of the allowed candidates, best first."""
        beams = enumerate(zip(self._live, logprobs, strict=True))
        rows = [_allowed(beam.score, parent, row) for parent, (beam, row) in beams]
        return merge(*rows, key=itemgetter(0), reverse=True)  # stable, as `_ranked` is

    def _ranked(self, candidates: Sequence[Sequence[Candidate]]) -> list[_Ranked]:
        """Return the allowed candidates, best first."""
        ranked: list[_Ranked] = []
        for parent, (beam, options) in enumerate(zip(self._live, candidates, strict=True)):
            for option in options:
                score = _float32(beam.score + option.logprob)
                if score > -math.inf:
                    ranked.append((score, parent, option))
        ranked.sort(key=itemgetter(0), reverse=True)  # stable: equal scores stay in order
        return ranked

    def _add_finished(self, ending: Sequence[_Ranked]) -> None:
        new = [
            Hypothesis(
                token_ids=(*self._live[parent].token_ids, candidate.token_id),
                score=self._normalised(score, self._num_steps),
                finish="eos" if candidate.token_id in self._params.eos_token_ids else "length",
                details=(*self._live[parent].details, candidate.details),
            )
            for score, parent, candidate in ending
        ]
        self._finished = _best_first([*self._finished, *new])[: self._params.beam_width]

    def _grown(self, chosen: Sequence[_Ranked]) -> list[_Beam]:
        """Return the beams after the step; the ones before it must not be used any more."""
        num_children = Counter(parent for _, parent, _ in chosen)
        beams = []
        for score, parent, candidate in chosen:
            num_children[parent] -= 1
            token_ids, details = self._live[parent].token_ids, self._live[parent].details
            if num_children[parent] > 0:
                token_ids, details = token_ids.copy(), details.copy()
            token_ids.append(candidate.token_id)
            details.append(candidate.details)
            beams.append(_Beam(token_ids, details, score))
        return beams

    def _cannot_improve(self, best_live_score: float) -> bool:
        """True if the search ends with the finished hypotheses, although beams are live."""
        params = self._params
        if len(self._finished) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        may_grow = params.early_stopping == "never" and params.length_penalty > 0
        length = params.max_tokens if may_grow else self._num_steps
        return self._normalised(best_live_score, length) <= self._finished[-1].score

    def _normalised(self, score: float, num_tokens: int) -> float:
        return _float32(score / _float32(num_tokens**self._params.length_penalty))

    def _extend_common_prefix(self) -> None:
        """Lengthen the prefix by the tokens that are now common.

        Every later hypothesis extends a live beam, and a finished one that is not among the num_return best never
        will be: so a prefix that all of these share stays shared.
        """
        returnable = self._finished[: self._params.num_return]
        outputs: list[Sequence[int]] = [beam.token_ids for beam in self._live]
        outputs += [each.token_ids for each in returnable]
        if not outputs:
            return
        shortest = min(outputs, key=len)
        for position in range(len(self._common_prefix), len(shortest)):
            if any(each[position] != shortest[position] for each in outputs):
                return
            self._common_prefix.append(shortest[position])


def _allowed(score: float, parent: int, logprobs: Sequence[float]) -> Iterator[tuple[float, int, int]]:
    """Iterate over one beam's part of `BeamSearch._by_score`."""
    for place, logprob in enumerate(logprobs):
        total = _float32(score + logprob)
        if total == -math.inf:
            return
        yield total, parent, place


def _float32(value: float) -> float:
    return c_float(value).value


def _best_first(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    return sorted(hypotheses, key=attrgetter("score"), reverse=True)
