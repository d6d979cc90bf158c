"""A synthetic load: arrival times and lengths of requests. Pure: the same seed gives the same load."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_NUMBER = re.compile(r"\d+")
_RANGE = re.compile(r"(\d+)-(\d+)")
_NORMAL = re.compile(r"normal:(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens: `N`, `A-B` (uniform) or `normal:MEAN:DEVIATION`; never below 1."""

    kind: Literal["uniform", "normal"]
    first: float
    second: float

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Parse one of the three forms. Raises ValueError for others."""
        if match := _NUMBER.fullmatch(text):
            lengths = cls("uniform", int(text), int(text))
        elif match := _RANGE.fullmatch(text):
            lengths = cls("uniform", int(match[1]), int(match[2]))
        elif match := _NORMAL.fullmatch(text):
            return cls("normal", float(match[1]), float(match[2]))
        else:
            raise ValueError(f"{text!r} is not a length; write 128, 64-256 or normal:128:32")
        if not 1 <= lengths.first <= lengths.second:
            raise ValueError(f"{text!r} is not a length; lengths are at least 1, the smaller one first")
        return lengths

    def draw(self, rng: random.Random) -> int:
        """One length."""
        if self.kind == "uniform":
            return rng.randint(int(self.first), int(self.second))
        return max(1, round(rng.gauss(self.first, self.second)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """A request that is not sent yet."""

    at_s: float  # since the start
    prompt: str | Sequence[int]
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """An open-loop load: arrivals are a Poisson process, whatever the server does."""

    rate: float  # requests per second; infinite: all at once
    num_requests: int | None
    duration_s: float | None  # of the arrivals
    output_len: Lengths
    prompt_len: Lengths
    prompt: str | None  # None: random tokens
    seed: int

    def plan(self, vocab_size: int, barred_token_ids: Sequence[int]) -> list[PlannedRequest]:
        """Every request, in the order of arrival."""
        rng = random.Random(self.seed)
        barred = set(barred_token_ids)
        allowed = [token for token in range(vocab_size) if token not in barred]
        planned: list[PlannedRequest] = []
        at_s = 0.0
        while self._wants_more(len(planned), at_s):
            prompt = self.prompt
            planned.append(
                PlannedRequest(
                    at_s=at_s,
                    prompt=prompt if prompt is not None else rng.choices(allowed, k=self.prompt_len.draw(rng)),
                    max_tokens=self.output_len.draw(rng),
                    seed=rng.getrandbits(63),
                )
            )
            at_s += rng.expovariate(self.rate) if self.rate != float("inf") else 0.0
        return planned

    def _wants_more(self, num_planned: int, at_s: float) -> bool:
        if self.num_requests is not None and num_planned >= self.num_requests:
            return False
        return self.duration_s is None or at_s < self.duration_s
