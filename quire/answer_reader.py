"""Deltas of a chat's answers: a parser for each sample, fed with the text of its chunks.

Knows no wire. The answers have to be read from their beginning.
"""

from dataclasses import replace

from quire.parsing.answer_format import AnswerFormat
from quire.parsing.answer_parser import AnswerParser
from quire.parsing.deltas import Delta
from quire.results import Accepted, Chunk


class AnswerReader:
    """Reads the answers of one request."""

    def __init__(self, format: AnswerFormat, *, may_reason: bool = True) -> None:
        """`may_reason`: answers may go on with reasoning that the prompt opens, and end it."""
        self._format = format
        self._may_reason = may_reason
        self._parsers: dict[int, AnswerParser] = {}  # by sample

    def read(self, accepted: Accepted, chunk: Chunk) -> Chunk:
        """The chunk with its deltas."""
        return replace(chunk, deltas=self.deltas_of(accepted, chunk))

    def deltas_of(self, accepted: Accepted, chunk: Chunk) -> tuple[Delta, ...]:
        """The deltas of the next chunk."""
        parser = self._parsers.get(chunk.index)
        if parser is None:
            in_reasoning = accepted.in_reasoning and self._may_reason
            parser = self._parsers[chunk.index] = AnswerParser(
                self._format, accepted.request_id, chunk.index, in_reasoning=in_reasoning
            )
        deltas = parser.push(chunk.text)
        return deltas if chunk.finish is None else deltas + parser.end()
