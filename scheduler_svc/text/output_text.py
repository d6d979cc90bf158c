"""Text of one sample as its tokens arrive: detokenised, searched for stop strings, released for good.

A function of the tokens pushed and of the parameters alone, so that replaying the tokens rebuilds it exactly.
It knows no request, no stream and no worker.
"""

from collections.abc import Sequence

from scheduler_svc.text.incremental_decoder import IncrementalDecoder
from scheduler_svc.text.stop_strings import StopStrings
from scheduler_svc.text.tokenizer import ModelTokenizer


class OutputText:
    """Text of one sample. After token i, `text[:released_ends[i]]` is released and never changes.

    Held back are characters whose bytes are incomplete and what may be the beginning of a stop string. Both are
    released once they are decided: by a later token, or after the last one by `finish`, so that `text` may end
    behind `released_ends[-1]`.

    Of several stop strings the one that ends first wins, of those that end together the longest; so the outcome
    does not depend on how the text is cut into tokens. One that is complete before `min_tokens` tokens are out is
    text like any other.

    The text continues the prompt: as `prompt_tail` give the prompt's last 16 tokens that have text, and the output's
    first word keeps its space. Without a tokenizer there is no text, only the count of tokens.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer | None,
        prompt_tail: Sequence[int],
        *,
        stop: Sequence[str],
        min_tokens: int,
        include_stop: bool,
        keep_special_tokens: bool,
    ) -> None:
        assert tokenizer is not None or not stop, "stop strings without a tokenizer are refused at admission"
        self.text = ""
        self.released_ends: list[int] = []
        self._tokenizer = tokenizer
        self._prompt_tail = tuple(prompt_tail)
        self._keep_special_tokens = keep_special_tokens
        self._decoder: IncrementalDecoder | None = None  # made for the first token: many texts wait long for that
        self._stop_strings = StopStrings(stop) if stop else None
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._state = 0  # of the search for stop strings
        self._held = ""  # may be the beginning of a stop string
        self._is_complete = False  # nothing is held, nothing more may come

    def push(self, token_id: int) -> str | None:
        """Add the next token. Returns the stop string that it completed: the text ends there, push no more."""
        assert not self._is_complete, "a token after the end"
        completed = None
        decoder = self._decoder or self._new_decoder()
        if decoder is not None:
            piece = decoder.push(token_id)
            if piece:
                if self._stop_strings is None:
                    self._release(piece)
                else:
                    completed = self._search(self._stop_strings, piece, len(self.released_ends) + 1)
        self.released_ends.append(len(self.text))
        return completed

    def push_final(self, token_id: int) -> None:
        """Add an end-of-sequence or stop token: it counts, and has text only with `include_stop`, as another token."""
        decoder = self._decoder or self._new_decoder()
        if decoder is not None and self._include_stop:
            self._release_rest(decoder.push(token_id) + decoder.flush(), len(self.released_ends) + 1)
        self.finish()
        self.released_ends.append(len(self.text))

    def finish(self) -> str | None:
        """Finish the text: release the text held back, incomplete UTF-8 as U+FFFD. Idempotent.

        Returns the stop string that the text held back completed: the text ends there.
        """
        if self._is_complete or self._decoder is None:
            self._is_complete = True
            return None
        return self._release_rest(self._decoder.flush(), len(self.released_ends))

    def _release_rest(self, piece: str, num_tokens: int) -> str | None:
        """Release the last piece with the text held back, after the same search."""
        completed = None
        if self._stop_strings is not None:
            completed = self._search(self._stop_strings, piece, num_tokens)
        else:
            self._release(piece)
        if completed is None:
            self._release(self._held)
        self._held = ""
        self._is_complete = True
        return completed

    def _new_decoder(self) -> IncrementalDecoder | None:
        if self._tokenizer is not None:
            self._decoder = self._tokenizer.decoder(self._prompt_tail, keep_special_tokens=self._keep_special_tokens)
        return self._decoder

    def _release(self, piece: str) -> None:
        # Only a string with a single owner grows in place: taken from self, long texts cost no copy per token.
        text, self.text = self.text, ""
        text += piece
        self.text = text

    def _search(self, stop_strings: StopStrings, piece: str, num_tokens: int) -> str | None:
        """Follows the piece through the automaton and releases what cannot be the beginning of a stop string."""
        state = self._state
        if not state and stop_strings.is_absent(piece):
            self._release(piece)
            return None
        may_stop = num_tokens >= self._min_tokens
        text = self._held + piece
        for end, char in enumerate(piece, start=len(self._held) + 1):
            state = stop_strings.advance(state, char)
            completed = stop_strings.completed[state]
            if completed is not None and may_stop:
                self._is_complete = True
                self._release(text[: end if self._include_stop else end - len(completed)])
                return completed
        self._state = state
        released = len(text) - stop_strings.num_held[state]
        self._release(text[:released])
        self._held = text[released:]
        return None
