"""Texts, bytes and ids of single tokens, asked of the scheduler once each and kept.

Knows one model at a time: another fingerprint empties what is kept.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

import quire

_MOST_AT_ONCE = 32_768  # the scheduler takes 65,536


class Vocabulary:
    """Pieces of the served model's tokens."""

    def __init__(self, client: quire.AsyncClient) -> None:
        self._client = client
        self._fingerprint = ""
        self._pieces: dict[int, bytes] = {}
        self._token_ids: dict[str, int | None] = {}  # by text; None: it is no token

    def use(self, model: quire.Model) -> None:
        """Forget the tokens of another model."""
        if model.fingerprint != self._fingerprint:
            self._fingerprint = model.fingerprint
            self._pieces, self._token_ids = {}, {}

    async def load(self, token_ids: Iterable[int]) -> None:
        """Make the pieces of these tokens known."""
        pieces = self._pieces
        missing = self._missing(token_ids)
        for begin in range(0, len(missing), _MOST_AT_ONCE):
            part = missing[begin : begin + _MOST_AT_ONCE]
            pieces.update(zip(part, await self._client.token_pieces(part), strict=True))

    def loading(self, token_ids: Iterable[int]) -> Callable[[], Awaitable[None]] | None:
        """The call of `load` for these tokens; None if all are known."""
        missing = self._missing(token_ids)
        return partial(self.load, missing) if missing else None

    async def token_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """Ids of those of a few texts that are tokens."""
        known = self._token_ids
        for text in texts:
            if text not in known:
                ids = (await self._client.tokenize(text, add_special_tokens=False)).token_ids
                known[text] = ids[0] if len(ids) == 1 else None
        return {text: found for text in texts if (found := known[text]) is not None}

    def piece(self, token_id: int) -> bytes:
        """Bytes of a token that was loaded."""
        return self._pieces[token_id]

    def text(self, token_id: int) -> str:
        """Text of a token that was loaded; parts of characters become U+FFFD."""
        return self._pieces[token_id].decode(errors="replace")

    def _missing(self, token_ids: Iterable[int]) -> list[int]:
        return sorted({each for each in token_ids if each not in self._pieces})


def ids_of(logprobs: Sequence[quire.TokenLogprobs]) -> Iterable[int]:
    """Token ids that log-probabilities name."""
    for each in logprobs:
        yield each.token_id
        for token_id, _ in each.top:
            yield token_id
