"""Grammars of outputs, as llguidance compiles them for the model's vocabulary: the tokens that may come next.

A matcher follows the output of one seat. A matcher that fails allows no token any more, so that its sample is reported
as invalid and the rest of the step goes on. It fails, too, where its masks cost too much, since all of the step waits
for them. Knows no rows of logits and no device.
"""

import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from math import inf

import numpy as np
import numpy.typing as npt
import structlog
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from common.grammar_limits import STEP_MAX_ITEMS
from common.native_faults import CONTROL_FLOW, shortened
from quire.machine import num_processors
from worker_svc.sampling.mask_makers import FREE_MASK_CPU_S, MOST_MASK_CPU_S, MaskMakers, MaskTask

WordArray = npt.NDArray[np.int32]

MOST_EXCESS_CPU_S = 1.0  # of all masks of an output, beyond what is free
_MOST_COMPILED = 64  # grammars kept compiled, for seats that come
_PART_OF_PROCESSORS = 0.8  # for masks, while the pass computes
_MOST_THREADS = 32
_COSTLY_S = 30.0  # for which a grammar that cost too much is known: a request that fails is tried again at once

log = structlog.get_logger()


class GrammarVocabulary:
    """The model's tokens as llguidance reads them, and the grammars that were compiled for them last."""

    def __init__(
        self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int], *, limits_time: bool = True
    ) -> None:
        """Raises ValueError if llguidance cannot read the tokenizer.

        `limits_time`: matchers fail by the processor time of their masks, too. Not so where several processes follow
        the same output and must agree.
        """
        self.vocab_size = vocab_size
        self._tokenizer = LLTokenizer(tokenizer_json.decode(), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._limits_time = limits_time
        self._limits = LLParserLimits(step_max_items=STEP_MAX_ITEMS)
        num_threads = min(_MOST_THREADS, max(1, int(num_processors() * _PART_OF_PROCESSORS)))
        self._makers = MaskMakers(num_threads, MOST_MASK_CPU_S if limits_time else inf)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._costly: dict[str, tuple[int, float]] = {}  # tokens behind which a grammar cost too much, known until

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of an output, of its own."""
        compiled = self._compiled.pop(grammar, None) or LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=self._limits
        )
        self._compiled[grammar] = compiled
        if len(self._compiled) > _MOST_COMPILED:
            self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def masks(self, matchers: "Sequence[SeatMatcher]") -> WordArray:
        """Tokens that each may take next, int32 [len(matchers), ceil(V / 32)], a bit each; none for one that failed."""
        words = np.zeros((len(matchers), -(-self.vocab_size // 32)), dtype=np.int32)
        tasks: dict[int, MaskTask] = {}
        for row, each in enumerate(matchers):
            if each.matcher is None:
                continue
            if self._is_too_costly(each):
                each.fail("masks of this grammar cost too much a moment ago")
                continue
            tasks[row] = MaskTask(partial(_make_mask, each.matcher, words[row]), (each.grammar, each.num_tokens))
        self._makers.make([*tasks.values()])
        for row, task in tasks.items():
            self._take(matchers[row], task)
        if any(task.is_given_up for task in tasks.values()):
            words = words.copy()  # threads that were left behind go on to write to the other
        for row, each in enumerate(matchers):
            if each.has_failed():
                words[row] = 0
        return words

    def _take(self, matcher: "SeatMatcher", task: MaskTask) -> None:
        """Charge a matcher for its mask; it fails if that raised, or cost too much."""
        if isinstance(task.error, CONTROL_FLOW):
            raise task.error
        if task.error is not None:
            matcher.fail(shortened(task.error))
            return
        excess_s = matcher.charge(task.cpu_s)
        if not task.is_given_up and (not self._limits_time or excess_s <= MOST_EXCESS_CPU_S):
            return
        self._costly[matcher.grammar] = matcher.num_tokens, time.monotonic() + _COSTLY_S
        if task.is_given_up:
            matcher.fail(f"a mask, or those alike in one step, take more than {MOST_MASK_CPU_S} s of processor time")
        else:
            matcher.fail(f"masks took {MOST_EXCESS_CPU_S} s of processor time beyond {FREE_MASK_CPU_S} s each")

    def _is_too_costly(self, matcher: "SeatMatcher") -> bool:
        """True if its grammar cost too much lately, in an output of at most as many tokens."""
        if not self._costly:
            return False
        now_s = time.monotonic()
        self._costly = {grammar: known for grammar, known in self._costly.items() if known[1] > now_s}
        known = self._costly.get(matcher.grammar)
        return known is not None and matcher.num_tokens >= known[0]


class SeatMatcher:
    """Matcher of one seat's output. The seat's next owner may take it over: see `begin`."""

    def __init__(self, grammar: str, *, forces: bool = False) -> None:
        """`forces`: tokens that the grammar forces will be asked for, so they are looked up ahead."""
        self.grammar = grammar
        self.forces = forces
        self.matcher: LLMatcher | None = None  # before `begin`, and once it has failed or is taken over
        self._excess_s: dict[int, float] = {}  # of masks, beyond what is free, by the tokens that each was made behind
        self._token_ids: list[int] = []  # that it has followed
        self._forced: list[int] = []  # tokens that come next, if they were looked up: the grammar allows no other

    @property
    def num_tokens(self) -> int:
        """Tokens of the output that it has followed."""
        return len(self._token_ids)

    def charge(self, cpu_s: float) -> float:
        """Add the processor time of a mask. Returns what all of the output's took beyond what is free."""
        if cpu_s > FREE_MASK_CPU_S:
            behind = self.num_tokens
            self._excess_s[behind] = self._excess_s.get(behind, 0.0) + cpu_s - FREE_MASK_CPU_S
        return sum(self._excess_s.values())

    def fail(self, reason: str) -> None:
        """Allow no token any more."""
        self.matcher = None
        log.warning("grammar failed", reason=reason[:500], num_tokens=len(self._token_ids))

    def begin(self, vocabulary: GrammarVocabulary, output: Sequence[int], earlier: "SeatMatcher | None") -> None:
        """Follow an output up to now. If `earlier` has the same grammar, only what differs from its output costs."""
        try:
            if not self._take_over(earlier, output):
                self.matcher, self._token_ids = vocabulary.matcher(self.grammar), []
            self.follow(output[len(self._token_ids) :])
        except CONTROL_FLOW:
            raise
        except BaseException as error:  # a panic of the Rust library is no Exception
            self.fail(shortened(error))

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
            self.fail(self.matcher.get_error())
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
        self._excess_s = {behind: excess_s for behind, excess_s in earlier._excess_s.items() if behind <= num_shared}
        return True


def _make_mask(matcher: LLMatcher, words: WordArray) -> None:
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
