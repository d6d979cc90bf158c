"""Offsets of tokens in the text, where tokens are parts of characters."""

import pytest

import quire
from gateway_svc.openai.logprobs import CompletionLogprobs
from gateway_svc.vocabulary import Vocabulary


class Pieces(Vocabulary):
    """Pieces by their places."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = dict(enumerate(pieces))


@pytest.mark.parametrize(
    ("pieces", "offsets"),
    [
        ([b"a", "é".encode(), b"b"], [0, 1, 2]),
        ([b"a", b"\xc3", b"\xa9", b"b"], [0, 1, 1, 2]),
        ([b"a", b"\xc3", b"b", b"c"], [0, 1, 2, 3]),
        ([b"\xf0\x9f", b"\xc3", b"\xa9x", b"y"], [0, 1, 1, 3]),
        ([b"\x80", b"a", b"", b"b"], [0, 1, 2, 2]),
    ],
)
def test_an_offset_is_that_of_the_token_also_behind_an_incomplete_character(
    pieces: list[bytes], offsets: list[int]
) -> None:
    of_output = CompletionLogprobs(Pieces(pieces), 0, as_ids=False)
    tokens = [quire.TokenLogprobs(token_id=number, logprob=-1.0, rank=1, top=()) for number in range(len(pieces))]
    made = of_output.tokens(tokens)
    assert made["text_offset"] == offsets
    text = b"".join(pieces).decode(errors="replace")
    for offset, token in zip(offsets, made["tokens"], strict=True):
        assert "\ufffd" in token or text[offset:].startswith(token)
