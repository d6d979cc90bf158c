"""What the readers of one request can see: an output that only grows, and their places in it.

Readers pull: a subscription is a position, so a slow reader costs no memory and loses nothing, and what it missed
comes in one piece. The engine releases what the journal has acknowledged; this file does not know why or when.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from common.errors import InvalidRequestError
from protos import inference_pb2 as pb


class TextLog(Protocol):
    """Text that grows with the tokens: `released_ends[i]` characters of it are out after token i."""

    @property
    def text(self) -> str: ...

    @property
    def released_ends(self) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class RecordedText:
    """The text of a request that has ended, from its record."""

    text: str
    released_ends: list[int]


@dataclass(slots=True, eq=False)
class OutputStream:
    """One sample's output. Written by the engine alone; everything below `num_released` never changes."""

    accepted: pb.Accepted
    wanted: pb.OutputParams
    text_log: TextLog
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)  # beside token_ids, if wanted
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    num_released: int = 0  # tokens that readers may see
    finish: pb.SampleFinish | None = None  # set with `finished`
    finished: pb.Finished | None = None  # set when the end may be seen
    subscriptions: "set[Subscription]" = field(default_factory=set)

    def release(self, num_tokens: int) -> None:
        """Lets readers see the first `num_tokens` tokens."""
        self.num_released = num_tokens
        self._notify()

    def close(self, finish: pb.SampleFinish, finished: pb.Finished) -> None:
        """Lets readers see everything, and the end."""
        self.num_released = len(self.token_ids)
        self.finish = finish
        self.finished = finished
        self._notify()

    @property
    def released_text(self) -> str:
        """The text that readers may see."""
        return self.text_log.text[: self.text_end(self.num_released)]

    def text_end(self, position: int) -> int:
        """How many characters a reader has seen with the first `position` tokens."""
        if self.finished is not None and position == len(self.token_ids):
            return len(self.text_log.text)
        return self.text_log.released_ends[position - 1] if position else 0

    def _notify(self) -> None:
        for subscription in self.subscriptions:
            subscription.notify()


class Subscription:
    """One reader's place in an output.

    Close it when the reader is gone: the request's fate may hang on its having readers.
    """

    __slots__ = ("_notify", "_on_close", "_position", "_text_position", "done", "stream")

    def __init__(
        self,
        stream: OutputStream,
        from_position: int,
        notify: "Callable[[Subscription], None]",
        on_close: Callable[[], None],
    ) -> None:
        """Raises InvalidRequestError if `from_position` lies beyond what was released."""
        if from_position > stream.num_released:
            raise InvalidRequestError(
                f"from_positions[0] is {from_position}, but only {stream.num_released} tokens were ever sent"
            )
        self.stream = stream
        self.done = False
        self._position = from_position
        self._text_position = stream.text_log.released_ends[from_position - 1] if from_position else 0
        self._notify = notify
        self._on_close = on_close
        stream.subscriptions.add(self)

    def notify(self) -> None:
        """There is something to take."""
        self._notify(self)

    @property
    def has_more(self) -> bool:
        """Whether tokens are out that this reader has not taken."""
        return self._position < self.stream.num_released

    @property
    def has_news(self) -> bool:
        """Whether there is something to take: tokens, or the end."""
        return self._position < self.stream.num_released or self.stream.finished is not None

    def take(self, max_tokens: int) -> tuple[pb.Chunk | None, pb.Finished | None]:
        """What is new to this reader, up to `max_tokens`: a chunk, and with the last one the end if it has come."""
        if not self.has_news:
            return None, None
        chunk = pb.Chunk()
        return chunk, self.take_into(chunk, max_tokens)

    def take_into(self, chunk: pb.Chunk, max_tokens: int) -> pb.Finished | None:
        """As `take`, into an empty chunk; there must be news.

        A chunk written where it lies in a larger message costs a third of one that is made and copied there.
        """
        stream, start = self.stream, self._position
        end = stream.num_released
        if end > start + max_tokens:
            end = start + max_tokens
        text_end = stream.text_end(end)
        chunk.position = start
        chunk.num_tokens = end - start
        chunk.text = stream.text_log.text[self._text_position : text_end]
        self._position, self._text_position = end, text_end
        if stream.wanted.token_ids:
            chunk.token_ids.extend(stream.token_ids[start:end])
        if stream.logprobs and stream.wanted.HasField("logprobs"):
            chunk.logprobs.extend(stream.logprobs[start:end])
        if stream.prompt_logprobs and start == 0 and stream.wanted.HasField("prompt_logprobs"):
            chunk.prompt_logprobs.extend(stream.prompt_logprobs)
        if stream.finish is None or end < stream.num_released:
            return None
        chunk.finish.CopyFrom(stream.finish)
        self.done = True
        return stream.finished

    def close(self) -> None:
        """Gives up the place."""
        self.stream.subscriptions.discard(self)
        self._on_close()
