"""History of a client process, event by event, as lines of JSON; and the lines read back, by request.

Every line has its time by the machine's monotonic clock, which all processes share. A process may be killed while it
writes: half a line at the end was not told to anybody.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import quire

_CHUNK_FIELDS = ("sample", "position", "tokens", "logprobs", "finish", "text")  # as in a Piece


class HistoryWriter:
    """Writer that appends to one file; every line is with the operating system before the call returns."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def submitted(self, request_id: str, ask: int) -> None:
        self._write(request_id, event="submitted", ask=ask)

    def accepted(self, request_id: str, *, attached: bool) -> None:
        self._write(request_id, event="accepted", attached=attached)

    def chunk(self, request_id: str, chunk: quire.Chunk) -> None:
        self._write(
            request_id,
            event="chunk",
            sample=chunk.index,
            position=chunk.position,
            tokens=list(chunk.token_ids),
            text=chunk.text,
            logprobs=[each.logprob for each in chunk.logprobs],
            finish=chunk.finish.reason.value if chunk.finish is not None else None,
        )

    def ended(self, request_id: str, *, error: quire.QuireError | None = None) -> None:
        """Record an end, with the kind of error that the reader saw; None: it finished."""
        kind = "finished" if error is None else type(error).__name__
        self._write(request_id, event="ended", state=kind, error="" if error is None else error.message)

    def _write(self, request_id: str, **fields: Any) -> None:
        self._file.write(json.dumps({"at_s": time.monotonic(), "request": request_id, **fields}) + "\n")
        self._file.flush()


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk as the client received it."""

    at_s: float
    sample: int
    position: int
    tokens: list[int]
    logprobs: list[float]
    finish: str | None
    text: str = ""


@dataclass(slots=True)
class Told:
    """Events of one request, told by any client."""

    request_id: str
    ask: int
    submitted_s: float
    accepted_s: float | None = None
    pieces: list[Piece] = field(default_factory=list)
    ended_s: float | None = None
    state: str | None = None  # "finished", or the kind of error
    error: str = ""

    @property
    def next_positions(self) -> list[int]:
        """Positions from which another reader goes on, by sample."""
        ends: dict[int, int] = {}
        for piece in self.pieces:
            ends[piece.sample] = piece.position + len(piece.tokens)
        return [ends.get(sample, 0) for sample in range(max(ends, default=-1) + 1)]

    @property
    def num_tokens(self) -> int:
        return sum(len(piece.tokens) for piece in self.pieces)

    def tokens_of(self, sample: int) -> list[int]:
        return [token for piece in self.pieces if piece.sample == sample for token in piece.tokens]

    def text_of(self, sample: int) -> str:
        """Text of a sample up to its end; who attaches behind that is told of the end, and what was held back, anew."""
        text = ""
        for piece in self.pieces:
            if piece.sample == sample:
                text += piece.text
                if piece.finish is not None:
                    break
        return text

    def finishes_of(self, sample: int) -> set[str]:
        """Reasons that were given for the end of a sample."""
        return {piece.finish for piece in self.pieces if piece.sample == sample and piece.finish is not None}


class History:
    """History that grows with its files: `update` reads new lines."""

    def __init__(self) -> None:
        self.requests: dict[str, Told] = {}
        self.num_tokens = 0
        self._ends: dict[Path, int] = {}  # of what was read of each file

    def update(self, files: Iterable[Path]) -> None:
        """Reads whole lines; of files in the order in which they were begun."""
        for file in files:
            if not file.exists():
                continue
            with file.open("rb") as stream:
                stream.seek(self._ends.get(file, 0))
                data = stream.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._ends[file] = self._ends.get(file, 0) + len(whole)
            for line in whole.splitlines():
                self._take(json.loads(line))

    def live_at(self, at_s: float) -> list[Told]:
        """Requests that had received tokens by then, and not their end."""
        return [
            told
            for told in self.requests.values()
            if told.pieces and told.pieces[0].at_s <= at_s and (told.ended_s is None or told.ended_s > at_s)
        ]

    def _take(self, line: dict[str, Any]) -> None:
        request_id, at_s = line["request"], line["at_s"]
        if line["event"] == "submitted":
            self.requests.setdefault(request_id, Told(request_id, line["ask"], at_s))
            return
        told = self.requests[request_id]
        match line["event"]:
            case "accepted":
                told.accepted_s = told.accepted_s or at_s
            case "chunk":
                tokens: Sequence[int] = line["tokens"]
                self.num_tokens += len(tokens)
                told.pieces.append(Piece(at_s, *(line[name] for name in _CHUNK_FIELDS)))
            case "ended":
                told.ended_s, told.state, told.error = at_s, line["state"], line["error"]
