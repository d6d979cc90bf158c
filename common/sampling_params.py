"""Sampling parameters of one sequence, and the table of those that are numbers.

The scheduler settles them once per sequence from the client's parameters, and a step sends them to the worker with the
sequence's state. A number is declared here once, with its default and range: the checks of requests, model folders and
steps, and the wire of steps, read `NUMERIC_PARAMS`. Knows no stop strings, tenants or text, and no message.
"""

import math
from array import array
from collections.abc import Sequence
from ctypes import c_float
from dataclasses import dataclass, field, fields
from typing import Any, cast


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericParam:
    """A number among the sampling parameters, by its name in `quire.v1.SamplingParams`, with its range.

    Bounds are compared as the wire has them, in float32. NaN is in no range.
    """

    name: str
    default: float | None  # without effect; None: absent is without effect
    low: float
    high: float = math.inf
    is_low_excluded: bool = False
    is_whole: bool = False
    draws_only: bool = False  # without effect where nothing is drawn
    trial: float  # a value with effect, for a worker's trial steps

    def allows(self, value: float) -> bool:
        low, high = c_float(self.low).value, c_float(self.high).value
        return low <= value <= high and not (self.is_low_excluded and value == low)

    @property
    def range(self) -> str:
        """The range in words."""
        if self.high == math.inf:
            return f"at least {self.low:g}"
        return f"a number {'above' if self.is_low_excluded else 'from'} {self.low:g} to {self.high:g}"


def _number(default: Any, **attributes: float) -> Any:
    """A field of `SequenceSampling` that is a number; attributes: those of its `NumericParam`."""
    return field(default=default, metadata=attributes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSampling:
    """Sampling parameters of one sequence, in the order in which they act on a row of logits.

    The grammar, allowed and suppressed ids, then bias, penalties, temperature, min-p, top-k, top-p, noise.
    Allowed ids are always stored as int32: there may be 65,536 of them for each of 128 samples.
    """

    seed: int  # uint64
    sample_index: int = 0
    grammar: str = ""  # that the output follows, as JSON for llguidance; empty: none
    forces_text: bool = False  # tokens for which the grammar leaves no choice may come several at a time
    allowed_token_ids: Sequence[int] | None = None
    suppressed_token_ids: tuple[int, ...] = ()  # barred while the sampled position is below suppressed_until
    suppressed_until: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = _number(1.0, low=0.01, high=100, trial=1.1)  # over prompt and output
    presence_penalty: float = _number(0.0, low=-2, high=2, trial=0.1)  # over output
    frequency_penalty: float = _number(0.0, low=-2, high=2, trial=0.1)  # over output
    temperature: float = _number(1.0, low=0, high=100, trial=0.8)  # 0 is greedy
    min_p: float = _number(0.0, low=0, high=1, draws_only=True, trial=0.01)
    top_k: int | None = _number(None, low=1, is_whole=True, draws_only=True, trial=50)
    top_p: float = _number(1.0, low=0, high=1, is_low_excluded=True, draws_only=True, trial=0.9)
    num_logprobs: int | None = None  # None: none; 0: the sampled token's; k: and the k most likely
    num_prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        token_ids = self.allowed_token_ids
        if token_ids is not None and not isinstance(token_ids, array):
            object.__setattr__(self, "allowed_token_ids", array("i", token_ids))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """True if penalties or a grammar are on, so that the worker needs the tokens so far."""
        return self.has_penalties or bool(self.grammar)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


NUMERIC_PARAMS = tuple(
    NumericParam(name=each.name, default=cast("float | None", each.default), **each.metadata)
    for each in fields(SequenceSampling)
    if each.metadata
)
DRAWS_ONLY = {each.name: each.default for each in NUMERIC_PARAMS if each.draws_only}  # defaults by name
