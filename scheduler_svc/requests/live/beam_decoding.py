"""One request's beam search, between the worker's candidates and the sequences that are its live beams.

Which beams live on is decided in `core.beam_search`, which blocks they hold in `core.beam_groups`; here the two are
held together, and what a reader may already see is known. It knows no journal, no text and no reader.
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
    """`common_token_ids` grows with what all hypotheses that may come back agree on, `common_logprobs` beside it."""

    def __init__(self, params: BeamSearchParams) -> None:
        self.common_token_ids: list[int] = []
        self.num_steps = 0
        self._search = BeamSearch(params)
        self._beams: list[Sequence] = []  # in the search's order; empty before the first step
        self._candidates: dict[Sequence, Candidates] = {}  # of the live beams, for the next step

    @property
    def num_candidates(self) -> int:
        """That are needed of each live beam."""
        return self._search.num_candidates

    @property
    def is_done(self) -> bool:
        return self._search.is_done

    def store_candidates(self, sequence: Sequence, candidates: Candidates) -> None:
        """Takes the candidates of one live beam; those that came before a preemption are replaced."""
        self._candidates[sequence] = candidates

    def advance(self, scheduler: Scheduler, group: SequenceGroup) -> journal_pb2.BeamStep:
        """Takes one step, which the group awaits. Returns what it was decided from, for the journal.

        When the search is done the group is as it was, for the caller to end.
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
        """Takes a step that was decided in an earlier life; `seat` comes behind the last.

        Raises ValueError if it is not the next step of this search.
        """
        if self._search.is_done:
            raise ValueError("a step of a beam search that was over")
        start = len(self.common_token_ids)
        self._search.advance(_given(step, self._search.num_live))
        self.num_steps += 1
        self.common_token_ids.extend(self._search.common_prefix(start))

    def seat(self, group: SequenceGroup) -> None:
        """After replaying: the live beams take the first places of the group."""
        outputs = self._search.live_outputs() if self.num_steps else []
        self._beams = group.sequences[: len(outputs)]
        for sequence, output in zip(self._beams, outputs, strict=True):
            sequence.token_ids.extend(output)

    def common_logprobs(self, start: int) -> list[pb.TokenLogprobs]:
        """Of the common tokens from `start` on; none if they were not asked for."""
        return _logprobs(self._search.common_details(start))

    def hypotheses(self) -> list[Hypothesis]:
        """The best, best first; before the search is done, the best so far."""
        return self._search.finish()

    def _contenders(self, answers: Seq[Candidates]) -> list[list[Candidate]]:
        """Those that can matter, by beam: of what is answered, and would have to be written, they are a small part."""
        places = self._search.contenders([each.token_ids for each in answers], [each.logprobs for each in answers])
        return [[_candidate(answer, i) for i in chosen] for answer, chosen in zip(answers, places, strict=True)]


def hypothesis_logprobs(hypothesis: Hypothesis) -> list[pb.TokenLogprobs]:
    """Of its tokens; none if they were not asked for."""
    return _logprobs(hypothesis.details)


def _logprobs(details: Seq[object]) -> list[pb.TokenLogprobs]:
    return [cast(pb.TokenLogprobs, each) for each in details if each is not None]


def _candidate(answer: Candidates, place: int) -> Candidate:
    token_id, rows = answer.token_ids[place], answer.rows
    return Candidate(token_id, answer.logprobs[place], None if rows is None else row_logprobs(token_id, rows, place))


def _given(step: journal_pb2.BeamStep, num_live: int) -> list[list[Candidate]]:
    """What the step was decided from; the other way round than `_beam_step`."""
    token_ids, counts = unpack_int32(step.token_ids), unpack_int32(step.num_candidates)
    details: Seq[object] = step.token_logprobs or [None] * len(token_ids)
    columns = zip(token_ids, unpack_float32(step.logprobs), details, strict=True)
    flat = (Candidate(*each) for each in columns)
    given = [list(islice(flat, count)) for count in counts]
    if len(given) != num_live or sum(counts) != len(token_ids):
        raise ValueError("a step of a beam search does not fit the search")
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
