"""Output of one request as its readers see it: samples that only grow, and each reader's position in them.

Readers pull: a subscription is a position in each sample, so a slow reader costs no memory and loses nothing; the part
that it missed comes in one piece. The engine releases tokens that the journal has acknowledged; this file does not know
why or when.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Protocol

from quire.errors import FieldViolation, InvalidRequestError
from quire.v1 import inference_pb2 as pb


class TextLog(Protocol):
    """Text that grows with the tokens: `released_ends[i]` characters of it are out after token i."""

    @property
    def text(self) -> str: ...

    @property
    def released_ends(self) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class RecordedText:
    """The text of a sample that has ended, from its record."""

    text: str
    released_ends: list[int]


@dataclass(slots=True, eq=False)
class SampleStream:
    """One sample's output. Everything below `num_released` never changes."""

    text_log: TextLog
    token_ids: list[int] = field(default_factory=list)
    logprobs: Sequence[pb.TokenLogprobs] = ()  # beside token_ids, if they were computed
    num_released: int = 0  # tokens that readers may see
    finish: pb.SampleFinish | None = None  # set when its end may be seen; the last token is then released

    def add_logprobs(self, fresh: Sequence[pb.TokenLogprobs]) -> None:
        """Append the log-probabilities of the newest tokens."""
        if isinstance(self.logprobs, list):
            self.logprobs.extend(fresh)
        else:
            self.logprobs = [*self.logprobs, *fresh]

    def close(self, finish: pb.SampleFinish) -> None:
        """Release every token, and the end."""
        self.num_released = len(self.token_ids)
        self.finish = finish

    @property
    def released_text(self) -> str:
        """Text that readers may see."""
        return self.text_log.text[: self.text_end(self.num_released)]

    def text_end(self, position: int) -> int:
        """Number of characters released with the first `position` tokens."""
        if self.finish is not None and position == len(self.token_ids):
            return len(self.text_log.text)
        return self.text_log.released_ends[position - 1] if position else 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class OutputStream:
    """Output of one request. Only the engine writes it.

    `samples` are those that readers may see, in the order of their index; the list grows at its end only.
    """

    accepted: pb.Accepted
    wanted: pb.OutputParams
    samples: list[SampleStream]
    prompt_logprobs: Sequence[pb.TokenLogprobs] = ()
    finished: pb.Finished | None = None  # set when the end may be seen; every sample has its finish by then
    subscriptions: "set[Subscription]" = field(default_factory=set)

    def is_behind(self, positions: Sequence[int]) -> bool:
        """True if one of these positions, by sample, lies beyond the released tokens."""
        released = chain((sample.num_released for sample in self.samples), repeat(0))
        return any(position > num for position, num in zip(positions, released, strict=False))

    def notify(self) -> None:
        """Notify the readers that more is released."""
        for subscription in self.subscriptions:
            subscription.notify()

    def close(self, finished: pb.Finished) -> None:
        """Release the end of the request."""
        self.finished = finished
        self.notify()


class _Place:
    """One reader's place in one sample."""

    __slots__ = ("index", "is_done", "position", "sample", "text_position")

    def __init__(self, index: int, sample: SampleStream, position: int, max_tokens: int) -> None:
        _check_position(index, position, max(max_tokens, sample.num_released))
        self.index = index
        self.is_done = False  # its end was taken
        self.sample = sample
        self.position = position
        ends = sample.text_log.released_ends
        # None while the reader is ahead of all that there is.
        self.text_position = None if position > len(ends) else (ends[position - 1] if position else 0)


def _check_position(index: int, position: int, max_tokens: int) -> None:
    """Raise InvalidRequestError for a position that no output of so many tokens has."""
    if position > max_tokens:
        raise _invalid_position(index, f"is {position}, but the request has at most {max_tokens} tokens")


def _invalid_position(index: int, description: str) -> InvalidRequestError:
    """The error for one of the positions that a reader gave."""
    return InvalidRequestError.of([FieldViolation(f"from_positions[{index}]", description)])


class Subscription:
    """Places of one reader in an output.

    Close it when the reader is gone: a request without readers may be cancelled.
    """

    __slots__ = (
        *("_from_positions", "_notify", "_num_known", "_on_close", "_open", "_wants_text_ends", "_wants_token_ids"),
        "stream",
    )

    def __init__(
        self,
        stream: OutputStream,
        from_positions: Sequence[int],
        notify: "Callable[[Subscription], None]",
        on_close: Callable[[OutputStream], None],
    ) -> None:
        """Raise InvalidRequestError if one of `from_positions` lies beyond the bound of its sample.

        A reader whose position lies beyond the released tokens waits there.
        """
        self.stream = stream
        self._from_positions = from_positions
        self._num_known = 0  # samples
        self._open: list[_Place] = []  # in samples whose end this reader has not taken
        self._notify = notify
        self._on_close = on_close
        self._wants_token_ids = stream.wanted.token_ids
        self._wants_text_ends = stream.wanted.text_ends
        self._learn_samples()
        num_samples = max(self._num_known, stream.accepted.num_samples)
        beyond = next((i for i, each in enumerate(from_positions) if each and i >= num_samples), None)
        if beyond is not None:
            raise _invalid_position(beyond, f"is of a sample that the request does not have: it returns {num_samples}")
        for index in range(self._num_known, len(from_positions)):  # of samples that come later
            _check_position(index, from_positions[index], stream.accepted.max_tokens)
        stream.subscriptions.add(self)

    def notify(self) -> None:
        """Notify the reader that there are chunks to take."""
        self._notify(self)

    @property
    def done(self) -> bool:
        """True if this reader has taken every chunk, and only `stream.finished` is left to send."""
        return self.stream.finished is not None and not self._open and self._num_known == len(self.stream.samples)

    @property
    def has_news(self) -> bool:
        """True if there are tokens to take, or the end of a sample or of the request."""
        if self._num_known < len(self.stream.samples):
            self._learn_samples()
        for place in self._open:
            if place.position < place.sample.num_released or place.sample.finish is not None:
                return True
        return self.stream.finished is not None

    def take_chunks(self, add_chunk: Callable[[], pb.Chunk], max_tokens: int) -> int:
        """Write the new tokens for this reader, one chunk per sample, up to `max_tokens` or a little more.

        `add_chunk` makes each chunk in place: a chunk made inside a larger message costs a third of one that is copied
        there. Returns the number of tokens, those with prompt_logprobs included: fewer than `max_tokens` only if none
        is left to take.
        """
        if self._num_known < len(self.stream.samples):
            self._learn_samples()
        num_taken = 0
        has_ended = False
        for place in self._open:
            sample = place.sample
            if place.position < sample.num_released or sample.finish is not None:
                if num_taken >= max_tokens:
                    break
                num_taken += self._fill(add_chunk(), place, max_tokens - num_taken)
                has_ended |= place.is_done
        if has_ended:
            self._open = [place for place in self._open if not place.is_done]
        return num_taken

    def close(self) -> None:
        """Leave the output."""
        self.stream.subscriptions.discard(self)
        self._on_close(self.stream)

    def _learn_samples(self) -> None:
        for index in range(self._num_known, len(self.stream.samples)):
            position = self._from_positions[index] if index < len(self._from_positions) else 0
            sample = self.stream.samples[index]
            self._open.append(_Place(index, sample, position, self.stream.accepted.max_tokens))
        self._num_known = len(self.stream.samples)

    def _fill(self, chunk: pb.Chunk, place: _Place, max_tokens: int) -> int:
        stream, sample = self.stream, place.sample
        start = min(place.position, sample.num_released)  # it may have ended before the reader's place
        end = min(sample.num_released, start + max_tokens)
        if place.text_position is None:
            place.text_position = sample.text_end(start)
        text_end = sample.text_end(end)
        if place.index:
            chunk.index = place.index
        chunk.position = place.position
        chunk.num_tokens = num_taken = end - start
        chunk.text = sample.text_log.text[place.text_position : text_end]
        if self._wants_text_ends:
            chunk.text_ends.extend([each - place.text_position for each in sample.text_log.released_ends[start:end]])
        place.position = max(place.position, end)
        place.text_position = text_end
        if self._wants_token_ids:
            if num_taken == 1:
                chunk.token_ids.append(sample.token_ids[start])
            else:
                chunk.token_ids.extend(sample.token_ids[start:end])
        if sample.logprobs and stream.wanted.HasField("logprobs"):
            chunk.logprobs.extend(sample.logprobs[start:end])
        if stream.prompt_logprobs and not start and not place.index and stream.wanted.HasField("prompt_logprobs"):
            chunk.prompt_logprobs.extend(stream.prompt_logprobs)
            num_taken += len(stream.prompt_logprobs)
        if sample.finish is not None and end == sample.num_released:
            chunk.finish.CopyFrom(sample.finish)
            place.is_done = True
        return num_taken
