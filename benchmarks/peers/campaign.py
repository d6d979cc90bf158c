"""Runs every system once a round, another one first each time, one process at a time, and notes what came of it.

Knows the protocol and the order; not how environments are made or how results are shown.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from benchmarks.peers.figures import Figures
from benchmarks.peers.peer_process import PeerError
from benchmarks.peers.runners.harness import Setup
from benchmarks.peers.runs_file import Run, RunsFile
from benchmarks.peers.workload import Load, Sent, warm_up

T = TypeVar("T")

LOAD_LIMIT_S = 900.0  # a model is converted, kernels are compiled
RUN_LIMIT_S = 900.0
ECHO_TOKENS = 3  # in a row, of a prompt's beginning or end; by accident that is rare
MAX_ECHOES = 1


class Peer(Protocol):
    """A runner that can be asked."""

    def ask(self, message: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Raises PeerError."""

    def peak_memory_bytes(self) -> int:
        """Peak memory of all its processes so far."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """One system, ready to be started."""

    name: str
    start: Callable[[], Peer]
    setup: Setup
    loads: Sequence[str]


@dataclass(slots=True, kw_only=True)
class Campaign:
    """Campaign of all rounds of one model in one precision."""

    entrants: Sequence[Entrant]
    loads: Mapping[str, Load]
    rounds: Mapping[str, int]  # of each load
    vocab_size: int
    runs: RunsFile
    tell: Callable[[str], None]

    def run(self) -> None:
        """Run all rounds. A failure of one system is recorded, and the others go on."""
        for number in range(max(self.rounds.values(), default=0)):
            for entrant in rotated(self.entrants, number):
                due = [load for load in entrant.loads if self._is_due(number, entrant.name, load)]
                if due:
                    self._run_system(number, entrant, due)

    def _is_due(self, number: int, system: str, load: str) -> bool:
        return number < self.rounds.get(load, 0) and (number, system, load) not in self.runs.runs

    def _run_system(self, number: int, entrant: Entrant, loads: Sequence[str]) -> None:
        peer = entrant.start()
        try:
            about = peer.ask({"op": "load", "setup": asdict(entrant.setup)}, LOAD_LIMIT_S)
            _ask_run(peer, warm_up(self.loads[loads[0]], self.vocab_size))
            for load in loads:
                self._run_load(number, entrant.name, load, peer, about)
        except PeerError as error:
            for load in loads:
                if (number, entrant.name, load) not in self.runs.runs:
                    self._record_run(Run(round=number, system=entrant.name, load=load, figures=None, error=str(error)))
        finally:
            peer.close()

    def _run_load(self, number: int, system: str, load: str, peer: Peer, about: dict[str, Any]) -> None:
        requests = self.loads[load].requests(self.vocab_size)
        answers = _ask_run(peer, requests)
        for request, answer in zip(requests, answers, strict=True):
            if not request.num_output == len(answer["token_ids"]) == len(answer["token_s"]):
                raise PeerError(f"got {len(answer['token_ids'])} tokens, requested {request.num_output}")
        if (num := num_echoes(requests, [each["token_ids"] for each in answers])) > MAX_ECHOES:
            raise PeerError(f"{num} outputs contain tokens of their prompts")
        due_s = [  # a turn is due when the one before has ended, which is when it is sent
            request.arrival_s if request.follows is None else answer["sent_s"]
            for request, answer in zip(requests, answers, strict=True)
        ]
        figures = Figures.of(due_s, [each["token_s"] for each in answers], peer.peak_memory_bytes())
        tokens = [each["token_ids"] for each in answers]
        self._record_run(Run(round=number, system=system, load=load, figures=figures, token_ids=tokens, about=about))

    def _record_run(self, run: Run) -> None:
        self.runs.add(run)
        said = f"{run.figures.tokens_per_s} tokens/s" if run.figures is not None else f"failed: {run.error}"
        self.tell(f"round {run.round + 1}, {run.load}, {run.system}: {said}")


def num_echoes(requests: Sequence[Sent], outputs: Sequence[Sequence[int]]) -> int:
    """Count the outputs that begin with their prompt from its second token on, or end with it."""
    found = 0
    for request, output in zip(requests, outputs, strict=True):
        head, prompt = list(output[:ECHO_TOKENS]), request.prompt
        found += len(head) == ECHO_TOKENS < len(prompt) and head in (prompt[1 : 1 + ECHO_TOKENS], prompt[-ECHO_TOKENS:])
    return found


def rotated(entrants: Sequence[T], number: int) -> list[T]:
    """Rotate the entrants, so that each round starts with another one."""
    first = number % len(entrants) if entrants else 0
    return [*entrants[first:], *entrants[:first]]


def _ask_run(peer: Peer, requests: Sequence[Sent]) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = peer.ask(
        {"op": "run", "requests": [asdict(each) for each in requests]}, RUN_LIMIT_S
    )["answers"]
    return answers
