"""Streams that are read with care: each position once, in order; and how much of them all has come."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import quire
from quire.params import GenerateParams
from tests.patience import patient


class Watched:
    """Reads streams; each position of each sample once, in order; knows how much has come.

    `num_new`: submissions that did not attach to a request that was there.
    """

    def __init__(self, client: quire.AsyncClient) -> None:
        self._client = client
        self.num_tokens = 0
        self.num_accepted = 0
        self.num_new = 0

    async def run(self, prompt: str | list[int], params: GenerateParams) -> quire.Completion:
        stream = self._client.stream(prompt, **params)
        positions: dict[int, int] = {}
        await stream.accepted()
        self.num_accepted += 1
        chunks = [chunk async for chunk in self._checked(stream, positions)]
        completion = await stream.completion()
        self.num_new += not (await stream.accepted()).attached
        for sample in completion.samples:  # what was delivered on the way is what there is at the end
            mine = [chunk for chunk in chunks if chunk.index == sample.index]
            assert tuple(token for chunk in mine for token in chunk.token_ids) == sample.token_ids
        return completion

    async def _checked(self, stream: quire.CompletionStream, positions: dict[int, int]) -> AsyncIterator[quire.Chunk]:
        async for chunk in stream:
            assert chunk.position == positions.get(chunk.index, 0)
            positions[chunk.index] = chunk.position + chunk.num_tokens
            self.num_tokens += chunk.num_tokens
            yield chunk


async def until_more_has_come(watched: Watched, runs: Sequence["asyncio.Task[object]"]) -> None:
    """Returns when each run was accepted and 300 more tokens have come, or no more can; raises what ended a run early.

    What was accepted finishes, whatever dies then; the rest might be refused more often than its client asks again.
    """
    enough = watched.num_tokens + 300
    async with asyncio.timeout(patient(60)):
        while (watched.num_tokens < enough or watched.num_accepted < len(runs)) and not all(run.done() for run in runs):
            await asyncio.sleep(0.01)
            for run in runs:
                if run.done():
                    run.result()
