"""Turns tokens into text one by one, and never takes back a character.

`tokenizers`' DecodeStream does the work, and three cases of it are handled here: bytes that never become UTF-8
(it would hold them, and all that follows, for ever), text that a later token would rewrite (it raises), and a
context that ends within a character (it would repeat the context). It knows nothing of stop strings.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from common.native_faults import CONTROL_FLOW

_REPLACEMENT = "\ufffd"
_NUM_CONTEXT = 8  # tokens before the text that decide about its first space
_MOST_HELD = 8  # tokens
_INCOMPLETE = 3  # a character has at most four bytes, so no more tokens than this can wait for its last one


class IncrementalDecoder:
    """Text as the continuation of `context`, whose own text is not repeated.

    Together, `push` of all tokens and `flush` give what decoding context and tokens at once adds to the context's
    text. One exception: a vocabulary that spells unknown characters as byte tokens decodes a run of them as a
    whole, so that one bad byte spoils good characters before it; what was released before stays as it is.

    `is_shown[token_id]` is 0 for ids without text: holes of the vocabulary, and special tokens unless kept.
    `plain_token` is one whose text does not depend on what stands beside it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        is_shown: bytes,
        context: Sequence[int],
        *,
        keep_special_tokens: bool,
        plain_token: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._is_shown = is_shown
        self._skip_special_tokens = not keep_special_tokens
        shown = [each for each in context if each < len(is_shown) and is_shown[each]]
        self._pending: list[int] = []  # tokens whose text is held back
        self._instead = [] if plain_token is None else [plain_token]  # of a context whose own text is no Unicode
        self._begin(self._whole_characters(shown))

    def push(self, token_id: int) -> str:
        """Text that became certain with this token."""
        if token_id >= len(self._is_shown) or not self._is_shown[token_id]:
            return ""
        pending = self._pending
        pending.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except CONTROL_FLOW:
            raise
        except BaseException:  # the stream knows no other sign: the token rewrites text that was released
            return self._release(len(pending))
        if text is not None:
            self._context = pending
            self._pending = []
            return text
        return "" if len(pending) < _MOST_HELD else self._release_undecodable()

    def flush(self) -> str:
        """Text held back, incomplete UTF-8 as U+FFFD."""
        return self._release(len(self._pending))

    def _release_undecodable(self) -> str:
        """Releases what no later token can change: all but the last few tokens, cut where no character is cut.

        Of `_INCOMPLETE + 1` places in a row, one lies between two characters.
        """
        pending = self._pending
        whole = self._decode(pending)
        for num_held in range(_INCOMPLETE + 1, 2 * _INCOMPLETE + 2):
            cut = len(pending) - num_held
            if self._decode(pending[:cut]) + self._decode(pending[cut:]) == whole:
                return self._release(cut)
        return self._release(len(pending))

    def _release(self, num_tokens: int) -> str:
        """Releases the first pending tokens for good and goes on behind them."""
        settled, held = self._pending[:num_tokens], self._pending[num_tokens:]
        if not settled:
            return ""
        text = self._text_after_context(settled)
        if text:
            self._begin(self._instead if text.endswith(_REPLACEMENT) else settled)
        else:
            self._begin(self._context)
        return text + "".join([self.push(each) for each in held])

    def _begin(self, context: list[int]) -> None:
        self._context = context  # not ending within a character: the stream would take it for its own text
        self._pending = []
        self._stream: DecodeStream = DecodeStream(ids=context, skip_special_tokens=self._skip_special_tokens)

    def _text_after_context(self, token_ids: list[int]) -> str:
        before, whole = self._decode(self._context), self._decode(self._context + token_ids)
        return whole[len(before) :] if whole.startswith(before) else self._decode(token_ids)

    def _whole_characters(self, token_ids: list[int]) -> list[int]:
        """The last tokens, some `_NUM_CONTEXT`, whose text neither begins nor ends within a character.

        With byte fallback a run of byte tokens that does is replacement characters from end to end. Where no such
        tokens are found, as behind bytes that never were text, a plain token stands for them.
        """
        for end in range(len(token_ids), max(0, len(token_ids) - _INCOMPLETE - 1), -1):
            begins = [end - _NUM_CONTEXT - num_more for num_more in range(_INCOMPLETE + 1)]
            for begin in [each for each in begins if each > 0] or [0]:
                if _REPLACEMENT not in self._decode(token_ids[begin:end]):
                    return token_ids[begin:end]
        return self._instead if token_ids else []

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens))
