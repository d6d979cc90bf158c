"""Log-probabilities in both of OpenAI's forms: parallel lists for completions, an object for each token for chats."""

import codecs
from collections.abc import Sequence
from typing import Any

import quire
from gateway_svc.vocabulary import Vocabulary


class CompletionLogprobs:
    """Log-probabilities of one output of a completion, made piece by piece, since offsets run on."""

    def __init__(self, vocabulary: Vocabulary, num_top: int) -> None:
        self._vocabulary = vocabulary
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
            "tokens": [self._vocabulary.text(token_ids[0])],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._advance(token_ids[0])],
        }
        return joined([first, self.tokens(logprobs)])

    def tokens(self, logprobs: Sequence[quire.TokenLogprobs]) -> dict[str, list[Any]]:
        """Lists of the next tokens, which are loaded."""
        text = self._vocabulary.text
        return {
            "tokens": [text(each.token_id) for each in logprobs],
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [self._top(each) for each in logprobs],
            "text_offset": [self._advance(each.token_id) for each in logprobs],
        }

    def _top(self, token: quire.TokenLogprobs) -> dict[str, float]:
        """The most likely tokens and the token itself, by text; of equal texts the most likely counts."""
        top: dict[str, float] = {}
        for token_id, logprob in (*token.top[: self._num_top], (token.token_id, token.logprob)):
            top.setdefault(self._vocabulary.text(token_id), logprob)
        return top

    def _advance(self, token_id: int) -> int:
        offset = max(0, self._offset)
        self._offset += len(self._decoder.decode(self._vocabulary.piece(token_id)))
        return offset


def joined(lists: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """One object of several, in their order."""
    return {name: [item for each in lists for item in each[name]] for name in lists[0]}


def chat_logprobs(
    logprobs: Sequence[quire.TokenLogprobs], num_top: int, vocabulary: Vocabulary
) -> list[dict[str, Any]]:
    """Log-probabilities of tokens, which are loaded, for a chat completion."""
    return [
        {
            **_token(each.token_id, each.logprob, vocabulary),
            "top_logprobs": [_token(token_id, logprob, vocabulary) for token_id, logprob in each.top[:num_top]],
        }
        for each in logprobs
    ]


def _token(token_id: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    return {"token": vocabulary.text(token_id), "logprob": logprob, "bytes": list(vocabulary.piece(token_id))}
