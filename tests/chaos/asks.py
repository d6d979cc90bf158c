"""Requests of a chaos run's clients: every kind on the demo model, the same for the same seed.

Kinds: greedy, sampled with a seed, four samples, the best two of four, beams, stop strings; some with
log-probabilities. Knows no client and no server.
"""

import random
from dataclasses import dataclass, replace

from quire.params import GenerateParams
from tests.e2e.pressure_load import Ask, Shape, mixed_asks

SHAPE = Shape(vocab_size=2048, prefix_lengths=(32, 48), max_own_prompt=24, max_output=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosAsk(Ask):
    """One request, with what chaos adds to the kinds of `Ask`."""

    best_of: int | None = None  # samples that are drawn, of which `num_samples` come back
    stop: tuple[str, ...] = ()

    def params(self) -> GenerateParams:
        params = Ask.params(self)
        if self.best_of is not None:
            params["best_of"] = self.best_of
        if self.stop:
            params["stop"] = list(self.stop)
        return params

    @property
    def streams(self) -> bool:
        """True if tokens are sent as they are made; most tokens of beams and ranked samples are sent at the end."""
        return self.beam_width is None and self.best_of is None


def chaos_asks(seed: int, number: int, min_tokens: int, max_tokens: int) -> list[ChaosAsk]:
    """Draw requests; each asks for a number of tokens between the two, and gets fewer only by a stop string."""
    rng = random.Random(seed)
    return [
        _of_chaos(index, ask, rng.randint(min_tokens, max_tokens))
        for index, ask in enumerate(mixed_asks(seed, number, SHAPE))
    ]


def _of_chaos(index: int, ask: Ask, max_tokens: int) -> ChaosAsk:
    fields = {name: getattr(ask, name) for name in Ask.__dataclass_fields__}
    mine = ChaosAsk(**{**fields, "max_tokens": max_tokens})
    if ask.num_samples == 4 and ask.beam_width is None and index % 2:
        return replace(mine, num_samples=2, best_of=4)
    if ask.num_samples == 1 and ask.beam_width is None and index % 3 == 0:
        return replace(mine, stop=("?", "\n\n"))
    return mine
