"""Beam searches without a model: next tokens are as likely as a random process makes them, the best beams live on.

What beams share hangs on how sure a model is of the next token, and no model of 13 B parameters is here. Each next
token takes a random part of what is left of the probability (stick-breaking): with a concentration c, a whole number,
the mean entropy is 1 + 1/2 + … + 1/c nats. All beams are equally sure, whatever they have said before.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from heapq import nlargest
from itertools import count
from math import expm1, log
from random import Random

from benchmarks.lengths import Lengths
from benchmarks.memory.saturated_pool import new_sequence
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepPlan

NUM_HISTORIES = 64  # searches that are made once; requests take them by turns
CONCENTRATIONS = (1, 6)


def entropy(concentration: int) -> float:
    """Mean entropy in nats a token."""
    return sum(1 / index for index in range(1, concentration + 1))


class RandomBeams:
    """The parents of the survivors, step after step; searches are made as far as they are asked for."""

    def __init__(self, width: int, concentration: int, seed: int) -> None:
        self._histories = [_history(width, concentration, Random(f"{seed} {n}")) for n in range(NUM_HISTORIES)]
        self._parents: list[list[list[int]]] = [[] for _ in range(NUM_HISTORIES)]
        self._ranks: dict[SequenceGroup, list[Sequence]] = {}  # live beams, best first

    def survivors(self, group: SequenceGroup) -> Seq[tuple[Sequence, int]]:
        """Survivors of the next step of its history; a child's token is its rank."""
        step = group.live[0].num_output_tokens
        live = self._ranks.get(group) or group.live
        number = group.arrival % NUM_HISTORIES
        known = self._parents[number]
        while len(known) <= step:
            known.append(next(self._histories[number]))
        return [(live[parent], rank) for rank, parent in enumerate(known[step])]

    def record_survivors(self, group: SequenceGroup, beams: list[Sequence]) -> None:
        """Store this search's live beams, best first."""
        self._ranks[group] = beams

    def drop_search(self, group: SequenceGroup) -> None:
        """Drop a search that ended."""
        self._ranks.pop(group, None)


class BeamsWithoutModel:
    """Executor of a pool's steps whose requests are beam searches."""

    def __init__(self, beams: RandomBeams) -> None:
        self._beams = beams
        self._known: dict[SequenceGroup, None] = {}

    def execute(self, plan: StepPlan) -> list[int]:
        """Execute a step. Beams sample nothing."""
        self._known = dict.fromkeys(plan.sequences[row].group for row in plan.candidate_rows)
        return []

    def decide(self, scheduler: Scheduler) -> None:
        """Decide the next beams of each search whose candidates are all known; none ends before its length."""
        for group in self._known:
            if not group.awaits_decision:
                continue
            live = group.live[0]
            if live.num_output_tokens + 1 == live.max_tokens:
                scheduler.finish_group(group)
                self._beams.drop_search(group)
            else:
                self._beams.record_survivors(group, scheduler.replace_beams(group, self._beams.survivors(group)))


def beam_groups(lengths: Iterable[Lengths], width: int) -> Iterator[SequenceGroup]:
    """Make a search for each."""
    seq_ids = count()
    for arrival, each in enumerate(lengths):
        beams = [new_sequence(next(seq_ids), [0] * each.num_input, each.num_output) for _ in range(width)]
        yield SequenceGroup(beams, arrival=arrival, awaits_host=True, num_candidates=width)


def _history(width: int, concentration: int, random: Random) -> Iterator[list[int]]:
    scores = [0.0]  # of the live beams, best first
    while True:
        candidates = [
            (score + logprob, parent)
            for parent, score in enumerate(scores)
            for logprob in _logprobs(width, concentration, random)
        ]
        best = nlargest(width, candidates)
        scores = [score for score, _ in best]
        yield [parent for _, parent in best]


def _logprobs(width: int, concentration: int, random: Random) -> list[float]:
    """Draw the log-probabilities of the best tokens by stick breaking: the first pieces are the longest, with some
    spare.
    """
    left = 0.0  # the logarithm of what is left of the stick
    pieces = []
    for _ in range(width + 2 * concentration):
        after = left - random.expovariate(concentration)
        pieces.append(left + log(-expm1(after - left)))
        left = after
    return nlargest(width, pieces)
