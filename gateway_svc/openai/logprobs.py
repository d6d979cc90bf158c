"""Log-probabilities in both of OpenAI's forms: parallel lists for completions, an object for each token for chats.

Those of a whole answer may be of millions of likely tokens: they are made of slices, between which other answers go on.
"""

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import orjson

import quire
from gateway_svc.event_stream import next_turn
from gateway_svc.single_tokens import MOST_AT_ONCE
from gateway_svc.vocabulary import Vocabulary, ids_of

_Piece = TypeVar("_Piece")

_CONTINUATION_MASK, _CONTINUATION = 0xC0, 0x80  # of the first byte of a piece within a character


class CompletionLogprobs:
    """Log-probabilities of one output of a completion, made piece by piece, since offsets run on."""

    def __init__(self, vocabulary: Vocabulary, num_top: int, *, as_ids: bool) -> None:
        """`as_ids`: see `chat_logprobs`."""
        self._vocabulary = vocabulary
        self._name = _namer(vocabulary, as_ids=as_ids)
        self._num_top = num_top
        self._offset = 0  # in characters, of the next token
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def prompt(self, text: str, token_ids: Sequence[int]) -> dict[str, list[Any]]:
        """Lists of the first token of an echoed prompt, which has no log-probability; its other `tokens` come next.

        The text may lack what its first tokens stand for, such as the beginning of a sequence: they are at offset 0.
        """
        pieces = b"".join(map(self._vocabulary.piece, token_ids))
        self._offset = len(text) - len(pieces.decode(errors="replace"))
        return {
            "tokens": [self._name(token_ids[0])],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._advance(token_ids[0])],
        }

    def tokens(self, logprobs: Sequence[quire.TokenLogprobs]) -> dict[str, list[Any]]:
        """Lists of the next tokens, which are loaded."""
        return {
            "tokens": [self._name(each.token_id) for each in logprobs],
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [self._top(each) for each in logprobs],
            "text_offset": [self._advance(each.token_id) for each in logprobs],
        }

    def _top(self, token: quire.TokenLogprobs) -> dict[str, float]:
        """The most likely tokens and the token itself, by name; of equal names the most likely counts."""
        top: dict[str, float] = {}
        for token_id, logprob in (*token.top[: self._num_top], (token.token_id, token.logprob)):
            top.setdefault(self._name(token_id), logprob)
        return top

    def _advance(self, token_id: int) -> int:
        piece = self._vocabulary.piece(token_id)
        if piece and piece[0] & _CONTINUATION_MASK != _CONTINUATION:  # what is incomplete before it stays so
            self._offset += len(self._decoder.decode(b"", final=True))
        offset = max(0, self._offset)
        self._offset += len(self._decoder.decode(piece))
        return offset


def slices(logprobs: Sequence[quire.TokenLogprobs]) -> Iterator[Sequence[quire.TokenLogprobs]]:
    """Tokens, some at once; an empty slice if there are none."""
    return (logprobs[start : start + MOST_AT_ONCE] for start in range(0, max(1, len(logprobs)), MOST_AT_ONCE))


async def in_turns(pieces: Iterable[_Piece]) -> list[_Piece]:
    """The pieces, each made in a turn of the event loop of its own."""
    made = []
    for piece in pieces:
        made.append(piece)
        await next_turn()
    return made


async def objects_in_turns(
    make: Callable[[Sequence[quire.TokenLogprobs]], list[Any]], logprobs: Sequence[quire.TokenLogprobs]
) -> list[orjson.Fragment]:
    """JSON of the objects that are made of tokens, slice by slice."""
    parts = await in_turns(
        [orjson.Fragment(orjson.dumps(each)) for each in make(tokens)] for tokens in slices(logprobs)
    )
    return [each for part in parts for each in part]


def joined(lists: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """One object of several, in their order."""
    return {name: [item for each in lists for item in each[name]] for name in lists[0]}


def chat_logprobs(
    logprobs: Sequence[quire.TokenLogprobs], num_top: int, vocabulary: Vocabulary, *, as_ids: bool = False
) -> list[dict[str, Any]]:
    """Log-probabilities of tokens, which are loaded, for a chat completion.

    `as_ids`: tokens are named `token_id:N` instead of by their texts, of which several may be equal.
    """
    name = _namer(vocabulary, as_ids=as_ids)

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": name(token_id), "logprob": logprob, "bytes": list(vocabulary.piece(token_id))}

    return [
        {**token(each.token_id, each.logprob), "top_logprobs": [token(*likely) for likely in each.top[:num_top]]}
        for each in logprobs
    ]


def prompt_logprobs(
    logprobs: Sequence[quire.TokenLogprobs], num_top: int, vocabulary: Vocabulary
) -> list[dict[str, dict[str, Any]]]:
    """Log-probabilities of a prompt's tokens behind the first, which are loaded, in vLLM's form.

    For each it is an object of it and of the most likely ones in its place, by token id.
    """

    def described(token_id: int, logprob: float, rank: int) -> tuple[str, dict[str, Any]]:
        return str(token_id), {"logprob": logprob, "rank": rank, "decoded_token": vocabulary.text(token_id)}

    return [
        dict(
            [
                *(described(*likely, rank) for rank, likely in enumerate(each.top[:num_top], 1)),
                described(each.token_id, each.logprob, each.rank),
            ]
        )
        for each in logprobs
    ]


async def whole_prompt_logprobs(
    logprobs: Sequence[quire.TokenLogprobs], num_top: int, vocabulary: Vocabulary
) -> list[orjson.Fragment | None]:
    """Log-probabilities of a whole prompt, whose first token has none."""
    await vocabulary.load(ids_of(logprobs))
    return [None, *await objects_in_turns(lambda tokens: prompt_logprobs(tokens, num_top, vocabulary), logprobs)]


def _namer(vocabulary: Vocabulary, *, as_ids: bool) -> Callable[[int], str]:
    return "token_id:{}".format if as_ids else vocabulary.text
