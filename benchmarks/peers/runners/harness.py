"""The runner's side of the protocol, and the two ways in which engines are driven: step by step, or batch by batch.

Lines of JSON: one request on stdin, one answer on stdout. Everything that a peer prints goes to stderr. It imports the
standard library alone, as it runs in every peer's environment, and knows no peer.
"""

import gc
import json
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol, Self

_NAP_S = 0.0005  # while nothing is there to be computed


@dataclass(frozen=True, slots=True)
class Request:
    """Request to serve: a prompt, a number of tokens to generate, and a time to send it."""

    index: int
    prompt: list[int]
    num_output: int
    arrival_s: float  # since the begin of the load
    follows: int | None = None  # index of the conversation's turn before; see `Recorder.in_conversation`


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Setup of the engine."""

    model: str
    cache: str  # a folder for what the engine makes of the model
    dtype: str  # "bfloat16" or "float32"
    threads: int
    max_num_seqs: int
    pool_tokens: int  # KV memory, where the engine can be told
    step_tokens: int  # computed in one step at most, where the engine can be told
    max_len: int  # of any sequence
    options: dict[str, Any]  # of this peer alone
    top_p: float | None = None  # of tokens drawn at temperature 1; None: greedy choice
    caches_prefixes: bool = False

    @property
    def drawing(self) -> dict[str, float]:
        """The choice of each token, in the words of vLLM and Quire."""
        return {"temperature": 0.0} if self.top_p is None else {"temperature": 1.0, "top_p": self.top_p}

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields)


@dataclass(slots=True)
class Recorder:
    """Arrival times of each request's tokens, on the clock of the load."""

    requests: Sequence[Request]
    began_s: float = field(default_factory=time.perf_counter)
    token_s: dict[int, list[float]] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    sent_s: dict[int, float] = field(default_factory=dict)

    def now_s(self) -> float:
        return time.perf_counter() - self.began_s

    def record_sent(self, index: int) -> None:
        self.sent_s[index] = self.now_s()
        self.token_s[index], self.token_ids[index] = [], []

    def record_tokens(self, index: int, tokens: Iterable[int]) -> None:
        """Record tokens; those beyond the length of the request are not counted."""
        now_s, ids = self.now_s(), self.token_ids[index]
        room = self.requests[index].num_output - len(ids)
        new = [int(token) for token in tokens][:room]
        ids.extend(new)
        self.token_s[index].extend([now_s] * len(new))

    def in_conversation(self, request: Request) -> Request:
        """The request with its whole prompt: all turns before, with the outputs that came, and its own tokens."""
        if request.follows is None:
            return request
        before = self.in_conversation(self.requests[request.follows])
        return replace(request, prompt=[*before.prompt, *self.token_ids[before.index], *request.prompt])

    def next_turn(self, index: int) -> Request | None:
        """The request that follows this one, which has ended."""
        return next((self.in_conversation(each) for each in self.requests if each.follows == index), None)

    def is_complete(self, index: int) -> bool:
        return len(self.token_ids.get(index, ())) == self.requests[index].num_output

    def answers(self) -> list[dict[str, Any]]:
        return [
            {
                "sent_s": self.sent_s[each.index],
                "token_s": self.token_s[each.index],
                "token_ids": self.token_ids[each.index],
            }
            for each in self.requests
        ]


class Engine(Protocol):
    """A peer with its model loaded."""

    computes_in: str  # what it has in fact of the precision that was asked for

    def run(self, recorder: Recorder) -> None:
        """Send every request at its time; return when all have ended."""

    def close(self) -> None:
        """Release the engine."""


class Stepping(Protocol):
    """An engine whose loop is ours."""

    def add(self, request: Request) -> None: ...

    def step(self) -> Iterable[tuple[int, Sequence[int]]]:
        """Run one iteration; return indices of requests with their new tokens."""


def drive_steps(engine: Stepping, recorder: Recorder) -> None:
    """Drive an engine step by step; requests are added between two steps."""
    waiting, live = deque(each for each in recorder.requests if each.follows is None), set[int]()
    while waiting or live:
        while waiting and waiting[0].arrival_s <= recorder.now_s():
            request = waiting.popleft()
            recorder.record_sent(request.index)
            engine.add(request)
            live.add(request.index)
        if not live:
            time.sleep(_NAP_S)
            continue
        for index, tokens in engine.step():
            recorder.record_tokens(index, tokens)
            if index in live and recorder.is_complete(index):
                live.discard(index)
                if (following := recorder.next_turn(index)) is not None:
                    waiting.append(following)


def drive_batches(run_batch: Callable[[Sequence[Request], Recorder], None], size: int, recorder: Recorder) -> None:
    """Drive an engine batch by batch, of at most `size` arrived requests; the next begins when one has ended."""
    coming, waiting = deque(recorder.requests), deque[Request]()
    while coming or waiting:
        while coming and coming[0].arrival_s <= recorder.now_s():
            request = coming.popleft()
            recorder.record_sent(request.index)
            waiting.append(request)
        if waiting:
            run_batch([waiting.popleft() for _ in range(min(size, len(waiting)))], recorder)
        else:
            time.sleep(_NAP_S)


def serve(load: Callable[[Setup], Engine], packages: Sequence[str]) -> None:
    """Answer requests until told to end. `packages`: names whose versions are reported."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the peer prints is no answer
    engine: Engine | None = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            match message["op"]:
                case "load":
                    began_s = time.perf_counter()
                    engine = load(Setup.of(message["setup"]))
                    seconds = time.perf_counter() - began_s
                    answer = {"seconds": seconds, "computes_in": engine.computes_in, "versions": _versions(packages)}
                case "run":
                    assert engine is not None, "a load comes behind the model"
                    answer = _run(engine, message["requests"])
                case _:
                    break
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    if engine is not None:
        engine.close()


def _run(engine: Engine, requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    loaded = [Request(index, **fields) for index, fields in enumerate(requests)]
    gc.collect()
    recorder = Recorder(loaded)
    engine.run(recorder)
    return {"seconds": recorder.now_s(), "answers": recorder.answers()}


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
