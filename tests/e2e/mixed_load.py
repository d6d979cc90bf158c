"""Requests of every kind at once on one model, and what each must answer."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Self, Unpack

import quire
from common.sampling_params import SequenceSampling
from quire.params import GenerateParams
from tests.e2e.beam_searches import Search, Searches
from tests.e2e.model_site import ModelSite
from tests.e2e.sampled_reference import Drawing, assert_drawn
from tests.equality import assert_equal_greedy
from tests.worker.tiny_models import GreedyReference, reference_greedy

NUM_TOKENS = 20
NUCLEUS = SequenceSampling(seed=11, temperature=0.9, top_p=0.9)
PENALISED = SequenceSampling(
    seed=12, sample_index=3, temperature=1.2, repetition_penalty=1.1, presence_penalty=0.4, frequency_penalty=0.2
)


@dataclass(frozen=True, slots=True)
class MixedLoad:
    """Beam searches, greedy requests for NUM_TOKENS, and samples alone and four at a time."""

    site: ModelSite
    searches: Searches
    prompts: list[list[int]]
    greedy: GreedyReference  # of the prompts

    @classmethod
    def of(cls, site: ModelSite, searches: Sequence[Search], prompts: list[list[int]]) -> Self:
        """Make a load with all its references; prompts are for the requests that are no searches."""
        return cls(site, Searches(site, searches), prompts, reference_greedy(site.folder, prompts, NUM_TOKENS))

    async def run(self, client: quire.AsyncClient, **more: Unpack[GenerateParams]) -> list[quire.Completion]:
        """Run all requests at once and check all outputs but the searches', which it returns."""
        drawings = [Drawing(each, NUCLEUS, NUM_TOKENS) for each in self.prompts]
        kinds = product(self.prompts[:2], (NUCLEUS, PENALISED))
        drawings += [Drawing(prompt, sampling, NUM_TOKENS, n=4) for prompt, sampling in kinds]
        async with asyncio.TaskGroup() as group:
            searched = [
                group.create_task(self.searches.run(client, index, **more)) for index in range(len(self.searches.all))
            ]
            greedy = [group.create_task(self._greedy(client, each)) for each in self.prompts]
            drawn = [group.create_task(client.generate(each.prompt, **each.request())) for each in drawings]
        outputs = [each.result().token_ids for each in greedy]
        assert_equal_greedy(self.greedy.tokens, self.greedy.margins, outputs)
        assert_drawn(self.site.reference, drawings, [each.result() for each in drawn])
        return [each.result() for each in searched]

    async def _greedy(self, client: quire.AsyncClient, prompt: list[int]) -> quire.Completion:
        return await client.generate(prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
