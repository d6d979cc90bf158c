"""Log-probabilities in both of OpenAI's forms: parallel lists for completions, an object for each token for chats."""

import codecs
from collections.abc import Callable, Sequence
from typing import Any

import quire
from gateway_svc.vocabulary import Vocabulary

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

    def prompt(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[quire.TokenLogprobs]
    ) -> dict[str, list[Any]]:
        """Lists of an echoed prompt, of whose tokens the first has no log-probability.

        The text may lack what its first tokens stand for, such as the beginning of a sequence: they are at offset 0.
        """
        pieces = b"".join(map(self._vocabulary.piece, token_ids))
        self._offset = len(text) - len(pieces.decode(errors="replace"))
        first: dict[str, list[Any]] = {
            "tokens": [self._name(token_ids[0])],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._advance(token_ids[0])],
        }
        return joined([first, self.tokens(logprobs)])

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
) -> list[dict[str, dict[str, Any]] | None]:
    """Log-probabilities of a prompt's tokens, which are loaded, in vLLM's form: for the first token None, then for each
    an object of it and of the most likely ones in its place, by token id.
    """

    def described(token_id: int, logprob: float, rank: int) -> tuple[str, dict[str, Any]]:
        return str(token_id), {"logprob": logprob, "rank": rank, "decoded_token": vocabulary.text(token_id)}

    return [
        None,
        *(
            dict(
                [
                    *(described(*likely, rank) for rank, likely in enumerate(each.top[:num_top], 1)),
                    described(each.token_id, each.logprob, each.rank),
                ]
            )
            for each in logprobs
        ),
    ]


def _namer(vocabulary: Vocabulary, *, as_ids: bool) -> Callable[[int], str]:
    return "token_id:{}".format if as_ids else vocabulary.text
