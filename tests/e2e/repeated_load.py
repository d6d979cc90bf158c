"""Load of streams whose ids are each submitted three times, by two clients: for tests in which shards come and go."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import quire
from common.sampling_params import SequenceSampling
from quire.params import GenerateParams
from tests.e2e.greedy_reference import assert_greedy
from tests.e2e.model_site import ModelSite
from tests.e2e.sampled_reference import Drawing, assert_drawn
from tests.e2e.watched import Watched
from tests.patience import patient
from tests.worker.tiny_models import random_prompts

NUM_TOKENS = 60
PROMPTS = random_prompts((1, 15, 33, 20), seed=9)
GREEDY: GenerateParams = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
NUM_AT_ONCE = 6


@dataclass(slots=True)
class RepeatedLoad:
    """Streams without end, by several clients: each id of ours is submitted three times, by one client after another
    or by two at once."""

    clients: list[quire.AsyncClient]
    outputs: dict[str, tuple[int, quire.Completion]] = field(default_factory=dict)  # by id: its kind
    num_accepted: Counter[str] = field(default_factory=Counter)
    num_made: int = 0  # with ids of the SDK
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _running: "list[asyncio.Task[None]]" = field(default_factory=list)

    def begin(self) -> None:
        self._running = [asyncio.create_task(self._ask_on()) for _ in range(NUM_AT_ONCE)]

    async def end(self) -> None:
        """Submit nothing new; return when what was submitted has ended. Raises what went wrong."""
        self._stop.set()
        await asyncio.gather(*self._running)

    async def until_more(self, number: int) -> None:
        """Returns once so many more outputs are complete. Raises what went wrong."""
        enough = len(self.outputs) + number
        async with asyncio.timeout(patient(60)):
            while len(self.outputs) < enough:
                for task in self._running:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.01)

    async def _ask_on(self) -> None:
        while not self._stop.is_set():
            number = next(self._numbers)
            request_id = None if number % 4 == 3 else f"ours-{number}"
            first, second = self.clients[number % 2], self.clients[(number + 1) % 2]
            if request_id is None:
                self.num_made += 1
                await self._ask(first, number, None)
                continue
            if number % 3:
                outputs = [await self._ask(client, number, request_id) for client in (first, second)]
            else:
                outputs = await asyncio.gather(*(self._ask(each, number, request_id) for each in self.clients))
            again = await self._ask(second, number, request_id)
            assert {each.samples[0].token_ids for each in (*outputs, again)} == {again.samples[0].token_ids}

    async def _ask(self, client: quire.AsyncClient, number: int, request_id: str | None) -> quire.Completion:
        params = params_of(number)
        if request_id is not None:
            params["request_id"] = request_id
        watched = Watched(client)
        output = await watched.run(PROMPTS[number % len(PROMPTS)], params)
        self.outputs[output.request_id] = (number, output)
        self.num_accepted[output.request_id] += watched.num_new
        return output


def params_of(number: int) -> GenerateParams:
    """Every second request is greedy, the others draw by a seed."""
    return drawing(number).request() if number % 2 else {**GREEDY}


def drawing(number: int) -> Drawing:
    prompt = PROMPTS[number % len(PROMPTS)]
    return Drawing(prompt, SequenceSampling(temperature=0.9, seed=1000 + number), NUM_TOKENS)


def assert_equal_to_reference(site: ModelSite, load: RepeatedLoad) -> None:
    outputs = list(load.outputs.values())
    greedy = [(number, output) for number, output in outputs if number % 2 == 0]
    assert_greedy(
        site.reference,
        [PROMPTS[number % len(PROMPTS)] for number, _ in greedy],
        [output.token_ids for _, output in greedy],
        NUM_TOKENS,
    )
    drawn = [(number, output) for number, output in outputs if number % 2]
    assert_drawn(site.reference, [drawing(number) for number, _ in drawn], [output for _, output in drawn])
