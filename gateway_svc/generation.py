"""The requests behind one HTTP call: one for each prompt, whose outputs are numbered through all prompts.

Knows the SDK and no API.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import quire
from quire.results import Usage
from quire.stream import CompletionStream


class Generation:
    """Streams of one call, submitted together. Leave it by `close`, which cancels what has not ended."""

    __slots__ = ("_arrivals", "_detaches", "_num_outputs", "_open", "_single", "_streams")

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
        self._single = streams[0] if len(streams) == 1 else None
        # Of several streams:
        self._arrivals: deque[int] = deque()  # their numbers, once for each chunk or end that has arrived
        self._open = set(range(len(streams)))  # numbers of those that are not at their end

    async def accepted(self) -> list["quire.Accepted"]:
        """Wait until all requests are durable. Raises the error of the first that is refused."""
        return [await stream.accepted() for stream in self._streams]

    async def completions(self) -> list["quire.Completion"]:
        """The whole outputs, by prompt. Raises as `CompletionStream`."""
        return list(await asyncio.gather(*(stream.completion() for stream in self._streams)))

    def listen(self, on_arrival: Callable[[], None]) -> None:
        """Call back whenever there is something to take, or the end, until closed."""
        if self._single is not None:
            self._single.listen(on_arrival)
            return
        for number, stream in enumerate(self._streams):
            stream.listen(partial(self._note, number, on_arrival))

    def take(self) -> tuple[int, "quire.Chunk"] | None:
        """The next chunk that has arrived, with the number of its output, or None. Raises as `CompletionStream`."""
        if self._single is not None:
            chunk = self._single.take()
            return None if chunk is None else (chunk.index, chunk)
        while self._arrivals:
            number = self._arrivals.popleft()
            stream = self._streams[number]
            if (chunk := stream.take()) is not None:
                return number * self._num_outputs + chunk.index, chunk
            if stream.is_at_end:
                self._open.discard(number)
        return None

    @property
    def is_at_end(self) -> bool:
        """True once all requests have ended and their output was taken."""
        return not self._open if self._single is None else self._single.is_at_end

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

    def _note(self, number: int, on_arrival: Callable[[], None]) -> None:
        self._arrivals.append(number)
        on_arrival()
