"""Models and loads that every system is given: shapes, lengths, arrivals. The same call always gives the same.

Knows no system.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.lengths import Dataset, LengthSampler
from benchmarks.random_models import CONFIG_FILE, SHAPES, write_random_model

NUM_REQUESTS = 64
_FIRST_TOKEN = 3  # those before it are special
_WARM_UP = (8, 16)  # requests, output tokens each at most
_WARM_UP_SEED = 1_000  # beyond those of the loads

MODELS = {name: SHAPES[name] for name in ("8m", "100m", "125m", "216m", "400m", "550m")}


@dataclass(frozen=True, slots=True)
class Sent:
    """One request of a load, with the fields that a runner reads."""

    prompt: list[int]  # in a conversation, what this turn adds to it
    num_output: int
    arrival_s: float
    follows: int | None = None  # index of the request of the turn before; this one is sent once that one has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Lengths of a trace, or all the same; all at once, as a Poisson process, or as the turns of conversations."""

    dataset: Dataset | None = None  # None: all as long as `lengths` says
    seed: int = 0  # of the lengths; chosen for the totals that the targets were set on
    lengths: tuple[int, int] = (1, 1)  # prompt and output, in tokens
    tokens_seed: int  # of the prompts' tokens and of the arrivals; another for each load, so that none warms a cache
    scale: float = 1.0  # of both lengths
    num_requests: int = NUM_REQUESTS
    rate: float | None = None  # requests/s; None: all at once
    num_turns: int = 1  # of each conversation, one request a turn; all first turns come at once
    shared_tokens: int = 0  # with which every conversation begins, the same

    def requests(self, vocab_size: int) -> list[Sent]:
        """Requests in the order of arrival, turn by turn.

        Random tokens, so no prefix is shared within a load, but that of its conversations, or between two loads.
        """
        tokens = Random(self.tokens_seed)

        def drawn(number: int) -> list[int]:
            return [tokens.randrange(_FIRST_TOKEN, vocab_size) for _ in range(number)]

        shared = drawn(self.shared_tokens)
        requests = [
            Sent(drawn(num_input), num_output, arrival_s)
            for (num_input, num_output), arrival_s in zip(self._sizes(), self._arrivals_s(), strict=True)
        ]
        at_once = self.num_requests // self.num_turns
        first = [replace(each, prompt=[*shared, *each.prompt]) for each in requests[:at_once]]
        return first + [replace(each, follows=index) for index, each in enumerate(requests[at_once:])]

    def _sizes(self) -> list[tuple[int, int]]:
        if self.dataset is None:
            return [self.lengths] * self.num_requests
        return [
            (max(1, round(each.num_input * self.scale)), max(1, round(each.num_output * self.scale)))
            for each in islice(LengthSampler(self.dataset, self.seed), self.num_requests)
        ]

    def _arrivals_s(self) -> list[float]:
        if self.rate is None:
            return [0.0] * self.num_requests
        gaps = Random(self.tokens_seed)
        return list(accumulate(gaps.expovariate(self.rate) for _ in range(self.num_requests)))


_SHAREGPT: dict[str, Any] = {"dataset": "sharegpt", "seed": 171, "scale": 0.25}
_ALPACA: dict[str, Any] = {"dataset": "alpaca", "seed": 1271}
CHATS = "chats"
LOADS = {
    "sharegpt": Load(**_SHAREGPT, tokens_seed=0),
    "alpaca": Load(**_ALPACA, tokens_seed=1),
    "long": Load(lengths=(1500, 48), num_requests=12, tokens_seed=2),
    "rate-1": Load(**_SHAREGPT, rate=1.0, num_requests=24, tokens_seed=3),
    "rate-2": Load(**_SHAREGPT, rate=2.0, num_requests=48, tokens_seed=4),
    "rate-4": Load(**_SHAREGPT, rate=4.0, tokens_seed=5),
    "parity": Load(**_ALPACA, num_requests=16, tokens_seed=6),
    CHATS: Load(**_SHAREGPT, tokens_seed=7, num_requests=96, num_turns=6, shared_tokens=512),
}


def longest_sequence(requests: Sequence[Sent]) -> int:
    """Tokens of the longest sequence, conversations with all that came before."""
    lengths: list[int] = []
    for each in requests:
        before = 0 if each.follows is None else lengths[each.follows]
        lengths.append(before + len(each.prompt) + each.num_output)
    return max(lengths)


def warm_up(load: Load, vocab_size: int) -> list[Sent]:
    """Requests as long as the first few of a load, all at once, with other prompts and short outputs."""
    number, longest = _WARM_UP
    others = replace(load, tokens_seed=_WARM_UP_SEED + load.tokens_seed).requests(vocab_size)[:number]
    return [Sent(each.prompt, min(each.num_output, longest), 0.0) for each in others]


def checkpoint(name: str, dtype: str, cache: Path) -> Path:
    """Folder of a random model of this shape, written once."""
    folder = cache / f"{name}-{dtype}"
    if not (folder / CONFIG_FILE).is_file():
        write_random_model(MODELS[name], folder, torch.device("cpu"), dtype=getattr(torch, dtype))
    return folder
