"""The requests behind one HTTP call: one for each prompt, whose outputs are numbered through all prompts.

Knows the SDK and no API.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import quire
from quire.results import Usage
from quire.stream import CompletionStream

_Found = tuple[int, "quire.Chunk"] | Exception | None  # None: a stream has ended


class Generation:
    """Streams of one call, submitted together. Leave it by `close`, which cancels what has not ended."""

    def __init__(self, streams: Sequence[CompletionStream], num_outputs: int, *, detaches: bool) -> None:
        """Hold streams that were submitted.

        Args:
            streams: one for each prompt.
            num_outputs: outputs of each prompt.
            detaches: a reader that goes leaves the requests to their on_disconnect, so that a retry finds them.
        """
        self._streams = streams
        self._num_outputs = num_outputs
        self._detaches = detaches
        self.is_attached = False  # True once all requests are accepted, if the server knew each of them before

    async def accepted(self) -> int:
        """Wait until all requests are durable. Returns the number of their prompts' tokens.

        Raises the error of the first that is refused.
        """
        accepted = [await stream.accepted() for stream in self._streams]
        self.is_attached = all(each.attached for each in accepted)
        return sum(each.num_prompt_tokens for each in accepted)

    async def completions(self) -> list["quire.Completion"]:
        """The whole outputs, by prompt. Raises as `CompletionStream`."""
        return list(await asyncio.gather(*(stream.completion() for stream in self._streams)))

    async def chunks(self) -> AsyncGenerator[tuple[int, "quire.Chunk"], None]:
        """Chunks as they come, each with the number of its output. Raises as `CompletionStream`."""
        if len(self._streams) == 1:
            async for chunk in self._streams[0]:
                yield chunk.index, chunk
            return
        queue: asyncio.Queue[_Found] = asyncio.Queue(maxsize=len(self._streams))
        readers = [asyncio.create_task(self._read(number, queue)) for number in range(len(self._streams))]
        num_open = len(readers)
        try:
            while num_open:
                match await queue.get():
                    case None:
                        num_open -= 1
                    case Exception() as error:
                        raise error
                    case found:
                        yield found
        finally:
            for reader in readers:
                reader.cancel()

    @property
    def usage(self) -> Usage:
        """Tokens of all requests that have ended."""
        ended = [stream.outcome.usage for stream in self._streams if stream.outcome is not None]
        return Usage(
            prompt_tokens=sum(each.prompt_tokens for each in ended),
            completion_tokens=sum(each.completion_tokens for each in ended),
            cached_tokens=sum(each.cached_tokens for each in ended),
        )

    async def close(self) -> None:
        """Let go of what has not ended."""
        for stream in self._streams:
            if self._detaches:
                stream.detach()
            else:
                await stream.aclose()

    async def _read(self, number: int, queue: "asyncio.Queue[_Found]") -> None:
        try:
            async for chunk in self._streams[number]:
                await queue.put((number * self._num_outputs + chunk.index, chunk))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)
