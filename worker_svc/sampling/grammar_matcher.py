"""Grammars of outputs, as llguidance compiles them for the model's vocabulary: the tokens that may come next.

A matcher follows the output of one seat. A matcher that fails allows no token any more, so that its sample is reported
as invalid and the rest of the step goes on. Knows no rows of logits, no threads and no device.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt
import structlog
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from common.native_faults import CONTROL_FLOW, shortened

WordArray = npt.NDArray[np.int32]

_MOST_COMPILED = 64  # grammars kept compiled, for seats that come

log = structlog.get_logger()


class GrammarVocabulary:
    """The model's tokens as llguidance reads them, and the grammars that were compiled for them last."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Raises ValueError if llguidance cannot read the tokenizer."""
        self.vocab_size = vocab_size
        self._tokenizer = LLTokenizer(tokenizer_json.decode(), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._executor = LLExecutor()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of an output, of its own."""
        compiled = self._compiled.pop(grammar, None) or LLMatcher(self._tokenizer, grammar, log_level=0)
        self._compiled[grammar] = compiled
        if len(self._compiled) > _MOST_COMPILED:
            self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def masks(self, matchers: "Sequence[SeatMatcher]") -> WordArray:
        """Tokens that each may take next, int32 [len(matchers), ceil(V / 32)], a bit each; none for one that failed."""
        words = np.zeros((len(matchers), -(-self.vocab_size // 32)), dtype=np.int32)
        working = [(matcher, row) for row, each in enumerate(matchers) if (matcher := each.matcher) is not None]
        if working:
            self._executor.unsafe_compute_mask_ptr(working, words.ctypes.data, words[0].nbytes, len(words))
        for row, each in enumerate(matchers):
            if each.has_failed():
                words[row] = 0
        return words


class SeatMatcher:
    """Matcher of one seat's output. The seat's next owner may take it over: see `begin`."""

    def __init__(self, grammar: str, *, forces: bool = False) -> None:
        """`forces`: tokens that the grammar forces will be asked for, so they are looked up ahead."""
        self.grammar = grammar
        self.forces = forces
        self.matcher: LLMatcher | None = None  # before `begin`, and once it has failed or is taken over
        self._token_ids: list[int] = []  # that it has followed
        self._forced: list[int] = []  # tokens that come next, if they were looked up: the grammar allows no other

    def begin(self, vocabulary: GrammarVocabulary, output: Sequence[int], earlier: "SeatMatcher | None") -> None:
        """Follow an output up to now. If `earlier` has the same grammar, only what differs from its output costs."""
        try:
            if not self._take_over(earlier, output):
                self.matcher, self._token_ids = vocabulary.matcher(self.grammar), []
            self.follow(output[len(self._token_ids) :])
        except CONTROL_FLOW:
            raise
        except BaseException as error:  # a panic of the Rust library is no Exception
            self._fail(shortened(error))

    def follow(self, token_ids: Sequence[int]) -> None:
        """Follow tokens of the output. Those after its end, which a step in flight may sample, are ignored."""
        for token_id in token_ids:
            if self.matcher is None or self.matcher.is_stopped():
                break
            self.matcher.consume_token(token_id)
            self._token_ids.append(token_id)
            self._forced = self._forced[1:] if self._forced[:1] == [token_id] else []
        self.has_failed()

    def look_ahead(self) -> None:
        """Look up the tokens that come next because the grammar allows no other."""
        if not self._forced and not self.has_failed() and self.matcher is not None and not self.matcher.is_stopped():
            self._forced = self.matcher.compute_ff_tokens()

    def force(self, most: int) -> list[int]:
        """Follow at most so many tokens that the grammar forces, and return them."""
        self.look_ahead()
        num_followed = len(self._token_ids)
        self.follow(self._forced[:most])
        return self._token_ids[num_followed:]

    def has_failed(self) -> bool:
        """True if no token can follow, by a fault: the grammar went beyond a limit, or a token was not of it."""
        if self.matcher is not None and self.matcher.is_error():
            self._fail(self.matcher.get_error())
        return self.matcher is None

    def _take_over(self, earlier: "SeatMatcher | None", output: Sequence[int]) -> bool:
        """Take the matcher of an earlier owner of the seat, and go back to what the two outputs share."""
        if earlier is None or earlier.grammar != self.grammar or earlier.matcher is None:
            return False
        matcher, followed = earlier.matcher, earlier._token_ids
        earlier.matcher = None
        pairs = zip(followed, output, strict=False)
        num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if not matcher.rollback(len(followed) - num_shared):
            return False
        self.matcher, self._token_ids = matcher, followed[:num_shared]
        return True

    def _fail(self, reason: str) -> None:
        self.matcher = None
        log.warning("grammar failed", reason=reason[:500], num_tokens=len(self._token_ids))
