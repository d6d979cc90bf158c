"""Beam search of one request: from the worker's candidates to the sequences that are its live beams.

`core.beam_search` decides which beams live on, `core.beam_groups` which blocks they hold; here the two are kept in
step, and the tokens that a reader may already see are collected. Knows no journal, no text and no reader.
"""

from collections.abc import Sequence as Seq
from itertools import islice
from typing import cast

from common.arrays import pack_float32, pack_int32, unpack_float32, unpack_int32
from common.step import Candidates
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.core.beam_search import BeamSearch, BeamSearchParams, Candidate, Hypothesis
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.requests.live.token_logprobs import row_logprobs


class BeamDecoding:
    """Search of one request. `common_token_ids` grows with the prefix that all possible hypotheses share."""

    def __init__(self, params: BeamSearchParams) -> None:
        self.common_token_ids: list[int] = []
        self.num_steps = 0
        self._search = BeamSearch(params)
        self._beams: list[Sequence] = []  # in the search's order; empty before the first step
        self._candidates: dict[Sequence, Candidates] = {}  # of the live beams, for the next step

    @property
    def num_candidates(self) -> int:
        """Number of candidates needed from each live beam."""
        return self._search.num_candidates

    @property
    def is_done(self) -> bool:
        return self._search.is_done

    def store_candidates(self, sequence: Sequence, candidates: Candidates) -> None:
        """Store the candidates of one live beam, in place of those from before a preemption."""
        self._candidates[sequence] = candidates

    def advance(self, scheduler: Scheduler, group: SequenceGroup) -> journal_pb2.BeamStep:
        """Advance the search by one step, which the group awaits. Returns its candidates, for the journal.

        When the search is done the group is unchanged, and the caller ends it.
        """
        beams = self._beams or group.live
        given = self._contenders([self._candidates[beam] for beam in beams])
        step = _beam_step(group, given)
        self._candidates.clear()
        start = len(self.common_token_ids)
        survivors = self._search.advance(given)
        if survivors:
            chosen = [(beams[each.parent], each.token_id) for each in survivors]
            self._beams = scheduler.replace_beams(group, chosen)
        self.num_steps += 1
        self.common_token_ids.extend(self._search.common_prefix(start))
        return step

    def replay(self, step: journal_pb2.BeamStep) -> None:
        """Replay a step of an earlier scheduler. After the last one call `assign_beams`.

        Raises ValueError if it is not the next step of this search.
        """
        if self._search.is_done:
            raise ValueError("a beam search has a step after its end")
        start = len(self.common_token_ids)
        self._search.advance(_given(step, self._search.num_live))
        self.num_steps += 1
        self.common_token_ids.extend(self._search.common_prefix(start))

    def assign_beams(self, group: SequenceGroup) -> None:
        """Give the live beams, after replaying, the first sequences of the group."""
        outputs = self._search.live_outputs() if self.num_steps else []
        self._beams = group.sequences[: len(outputs)]
        for sequence, output in zip(self._beams, outputs, strict=True):
            sequence.token_ids.extend(output)

    def common_logprobs(self, start: int) -> list[pb.TokenLogprobs]:
        """Log-probabilities of the common tokens from `start` on; empty if they were not asked for."""
        return _logprobs(self._search.common_details(start))

    def hypotheses(self) -> list[Hypothesis]:
        """Best hypotheses, best first; before the search is done, the best so far."""
        return self._search.finish()

    def _contenders(self, answers: Seq[Candidates]) -> list[list[Candidate]]:
        """Candidates that can matter, by beam: a small part of the answers, and only they have to be journaled."""
        places = self._search.contenders([each.token_ids for each in answers], [each.logprobs for each in answers])
        return [[_candidate(answer, i) for i in chosen] for answer, chosen in zip(answers, places, strict=True)]


def hypothesis_logprobs(hypothesis: Hypothesis) -> list[pb.TokenLogprobs]:
    """Log-probabilities of its tokens; empty if they were not asked for."""
    return _logprobs(hypothesis.details)


def _logprobs(details: Seq[object]) -> list[pb.TokenLogprobs]:
    return [cast(pb.TokenLogprobs, each) for each in details if each is not None]


def _candidate(answer: Candidates, place: int) -> Candidate:
    token_id, rows = answer.token_ids[place], answer.rows
    return Candidate(token_id, answer.logprobs[place], None if rows is None else row_logprobs(token_id, rows, place))


def _given(step: journal_pb2.BeamStep, num_live: int) -> list[list[Candidate]]:
    """Candidates that decided a journaled step; the inverse of `_beam_step`."""
    token_ids, counts = unpack_int32(step.token_ids), unpack_int32(step.num_candidates)
    details: Seq[object] = step.token_logprobs or [None] * len(token_ids)
    columns = zip(token_ids, unpack_float32(step.logprobs), details, strict=True)
    flat = (Candidate(*each) for each in columns)
    given = [list(islice(flat, count)) for count in counts]
    if len(given) != num_live or sum(counts) != len(token_ids):
        raise ValueError("a step of a beam search does not fit its live beams")
    return given


def _beam_step(group: SequenceGroup, given: Seq[Seq[Candidate]]) -> journal_pb2.BeamStep:
    flat = [each for candidates in given for each in candidates]
    return journal_pb2.BeamStep(
        sequence=group.sequences[0].seq_id,
        num_candidates=pack_int32(len(candidates) for candidates in given),
        token_ids=pack_int32(each.token_id for each in flat),
        logprobs=pack_float32(each.logprob for each in flat),
        token_logprobs=_logprobs([each.details for each in flat]),
    )
