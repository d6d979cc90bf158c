"""Outputs that grow at random and readers who come, take and leave at random: each sees everything once, in order."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.errors import InvalidRequestError
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.live.output_stream import OutputStream, SampleStream, Subscription

MOST_SAMPLES = 4
NUM_PROMPT_LOGPROBS = 3


@dataclass(slots=True)
class GrowingText:
    """Two letters a token, of which some are held back."""

    text: str = ""
    held: str = ""
    released_ends: list[int] = field(default_factory=list)

    def push(self, token_id: int, num_held: int) -> None:
        whole = self.held + chr(97 + token_id % 26) + chr(65 + token_id % 26)
        num_out = max(0, len(whole) - num_held)
        self.text, self.held = self.text + whole[:num_out], whole[num_out:]
        self.released_ends.append(len(self.text))

    def flush(self) -> None:
        self.text, self.held = self.text + self.held, ""


@dataclass(slots=True)
class Sample:
    """Sample with its full text, of which `stream` shows a part."""

    stream: SampleStream
    text: GrowingText


@dataclass(slots=True)
class Reader:
    """Reader with its output, by sample."""

    place: Subscription
    starts: list[int]
    texts: list[str] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    num_finishes: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 0

    def add(self, chunk: pb.Chunk, samples: list[Sample]) -> None:
        for index in range(len(self.positions), chunk.index + 1):
            self.positions.append(self.starts[index] if index < len(self.starts) else 0)
            self.texts.append("")
            self.num_finishes.append(0)
        stream = samples[chunk.index].stream
        start, end = chunk.position, chunk.position + chunk.num_tokens
        assert self.num_finishes[chunk.index] == 0, "output behind the finish"
        assert start == self.positions[chunk.index]
        assert end <= stream.num_released
        assert list(chunk.token_ids) == stream.token_ids[start:end]
        assert [each.token_id for each in chunk.logprobs] == stream.token_ids[start:end]
        assert chunk.num_tokens or chunk.HasField("finish")
        text, ends = samples[chunk.index].text.text, [0, *samples[chunk.index].text.released_ends]
        assert list(chunk.text_ends) == [each - ends[start] for each in ends[start + 1 : end + 1]]
        assert chunk.text == text[ends[start] : len(text) if chunk.HasField("finish") else ends[end]]
        if chunk.prompt_logprobs:
            assert (chunk.index, chunk.position, len(chunk.prompt_logprobs)) == (0, 0, NUM_PROMPT_LOGPROBS)
        self.num_prompt_logprobs += len(chunk.prompt_logprobs)
        self.positions[chunk.index] = end
        self.texts[chunk.index] += chunk.text
        self.num_finishes[chunk.index] += chunk.HasField("finish")


class OutputStreamMachine(RuleBasedStateMachine):
    """One request: `samples` that readers may see, and hidden ones that they see at the end."""

    def __init__(self) -> None:
        super().__init__()
        wanted = pb.OutputParams(token_ids=True, logprobs=0, prompt_logprobs=0, text_ends=True)
        prompt_logprobs = [pb.TokenLogprobs(token_id=i) for i in range(NUM_PROMPT_LOGPROBS)]
        self.stream = OutputStream(pb.Accepted(), wanted, [], prompt_logprobs)
        self.samples: list[Sample] = []
        self.readers: list[Reader] = []
        self.notified: set[Subscription] = set()
        self.num_tokens = 0

    @property
    def is_open(self) -> bool:
        return self.stream.finished is None

    @property
    def growing(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.stream.finish is None]

    @precondition(lambda self: self.is_open and len(self.samples) < MOST_SAMPLES)
    @rule()
    def add_sample(self) -> None:
        text = GrowingText()
        self.samples.append(Sample(SampleStream(text), text))
        self.stream.samples.append(self.samples[-1].stream)
        self.stream.notify()

    @precondition(lambda self: self.growing)
    @rule(data=st.data(), num_held=st.lists(st.integers(0, 3), min_size=1, max_size=6))
    def settle(self, data: st.DataObject, num_held: list[int]) -> None:
        sample = data.draw(st.sampled_from(self.growing))
        for each in num_held:
            self.num_tokens += 1
            sample.stream.token_ids.append(self.num_tokens)
            sample.stream.add_logprobs([pb.TokenLogprobs(token_id=self.num_tokens)])
            sample.text.push(self.num_tokens, each)

    @precondition(lambda self: self.growing)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(self.growing)).stream
        stream.num_released = data.draw(st.integers(stream.num_released, len(stream.token_ids)))
        self.stream.notify()

    @precondition(lambda self: self.growing)
    @rule(data=st.data())
    def end_sample(self, data: st.DataObject) -> None:
        sample = data.draw(st.sampled_from(self.growing))
        sample.text.flush()
        sample.stream.close(pb.SampleFinish(reason=pb.FINISH_REASON_LENGTH))
        self.stream.notify()

    @precondition(lambda self: self.is_open and self.samples)
    @rule()
    def end_all(self) -> None:
        for sample in self.growing:
            sample.text.flush()
            sample.stream.close(pb.SampleFinish(reason=pb.FINISH_REASON_CANCELLED))
        self.stream.close(pb.Finished())

    @rule(data=st.data())
    def come(self, data: st.DataObject) -> None:
        starts = [data.draw(st.integers(0, sample.stream.num_released)) for sample in self.samples]
        starts = starts[: data.draw(st.integers(0, len(starts)))]
        self.readers.append(Reader(Subscription(self.stream, starts, self.notified.add, lambda _: None), starts))
        self.notified.add(self.readers[-1].place)

    @rule(data=st.data())
    def come_too_early(self, data: st.DataObject) -> None:
        starts = [sample.stream.num_released for sample in self.samples] + [0]
        index = data.draw(st.integers(0, len(starts) - 1))
        starts[index] += data.draw(st.integers(1, 5))
        num_readers = len(self.stream.subscriptions)
        with pytest.raises(InvalidRequestError, match=rf"from_positions\[{index}\]"):
            Subscription(self.stream, starts, self.notified.add, lambda _: None)
        assert len(self.stream.subscriptions) == num_readers

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), max_tokens=st.integers(1, 12))
    def take(self, data: st.DataObject, max_tokens: int) -> None:
        self._take(data.draw(st.sampled_from(self.readers)), max_tokens)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        self.readers.remove(reader)
        reader.place.close()
        assert reader.place not in self.stream.subscriptions

    def _take(self, reader: Reader, max_tokens: int) -> int:
        has_news, was_notified = reader.place.has_news, reader.place in self.notified
        chunks = pb.SessionResponse()
        num_taken = reader.place.take_chunks(lambda: chunks.events.add().chunk, max_tokens)
        found = [event.chunk for event in chunks.events]
        assert len({chunk.index for chunk in found}) == len(found), "two chunks of a sample at once"
        assert num_taken == sum(chunk.num_tokens + len(chunk.prompt_logprobs) for chunk in found)
        assert num_taken <= max_tokens + NUM_PROMPT_LOGPROBS
        assert has_news or not found
        assert was_notified or not found, "news of which nobody was told"
        for chunk in found:
            reader.add(chunk, self.samples)
        if num_taken < max_tokens:
            assert reader.place.done or not reader.place.has_news, "something was left behind"
            self.notified.discard(reader.place)
        return num_taken

    @invariant()
    def done_is_said_when_all_ends_are_taken_and_not_before(self) -> None:
        for reader in self.readers:
            is_done = not self.is_open and reader.num_finishes == [1] * len(self.samples)
            assert reader.place.done == is_done

    def teardown(self) -> None:
        if not self.samples:
            return
        if self.is_open:
            self.end_all()
        for reader in self.readers:
            while not reader.place.done:
                assert reader.place.has_news
                self._take(reader, 7)
            assert reader.positions == [len(sample.stream.token_ids) for sample in self.samples]
            for index, sample in enumerate(self.samples):
                start = reader.starts[index] if index < len(reader.starts) else 0
                seen_before = sample.text.released_ends[start - 1] if start else 0
                assert reader.texts[index] == sample.text.text[seen_before:]
            is_from_start = not reader.starts or not reader.starts[0]
            assert reader.num_prompt_logprobs == (NUM_PROMPT_LOGPROBS if is_from_start else 0)


TestOutputStream = OutputStreamMachine.TestCase
TestOutputStream.settings = settings(max_examples=250, stateful_step_count=40)


def growing(*num_held: int) -> Sample:
    """Sample of tokens 0, 1, ..., of which none is released; `num_held` letters are held back after each."""
    text = GrowingText()
    stream = SampleStream(text)
    for token_id, each in enumerate(num_held):
        stream.token_ids.append(token_id)
        text.push(token_id, each)
    return Sample(stream, text)


def test_the_text_that_may_be_seen_is_that_of_the_released_tokens_and_all_of_it_at_the_end() -> None:
    sample = growing(0, 1, 0, 1)  # "aA", "b", "BcC", "d", and "D" at the end
    seen = []
    for num_released in range(5):
        sample.stream.num_released = num_released
        seen.append(sample.stream.released_text)
    assert seen == ["", "aA", "aAb", "aAbBcC", "aAbBcCd"]
    sample.text.flush()
    assert sample.stream.released_text == "aAbBcCd", "the end may not be seen yet"
    sample.stream.close(pb.SampleFinish(reason=pb.FINISH_REASON_LENGTH))
    assert sample.stream.released_text == "aAbBcCdD"


def test_an_output_is_behind_a_reader_who_has_seen_more_of_any_sample() -> None:
    samples = [growing(0, 0, 0).stream, growing(0, 0).stream]
    stream = OutputStream(pb.Accepted(max_tokens=8, num_samples=3), pb.OutputParams(), samples)
    samples[0].num_released, samples[1].num_released = 3, 1
    for positions in ([], [3], [0, 1], [3, 1], [3, 1, 0, 0]):
        assert not stream.is_behind(positions), positions
    for positions in ([4], [0, 2], [3, 2], [0, 0, 1], [3, 1, 0, 1]):
        assert stream.is_behind(positions), positions


def test_a_reader_gets_only_what_it_wants() -> None:
    sample = growing(0, 0).stream
    sample.logprobs = [pb.TokenLogprobs(token_id=each) for each in sample.token_ids]  # computed to rank the samples
    sample.num_released = 2
    of_prompt = [pb.TokenLogprobs(token_id=7)]
    stream = OutputStream(pb.Accepted(max_tokens=8, num_samples=1), pb.OutputParams(), [sample], of_prompt)
    chunk = pb.Chunk()
    assert Subscription(stream, (), lambda _: None, lambda _: None).take_chunks(lambda: chunk, 9) == 2
    assert chunk == pb.Chunk(num_tokens=2, text="aAbB")


def test_who_has_every_token_gets_the_text_that_was_held_back_with_the_end() -> None:
    sample = growing(0, 1)  # "aA", "b", and "B" at the end
    sample.stream.num_released = 2
    stream = OutputStream(pb.Accepted(max_tokens=8, num_samples=1), pb.OutputParams(), [sample.stream])
    place = Subscription(stream, (2,), lambda _: None, lambda _: None)
    sample.text.flush()
    sample.stream.close(pb.SampleFinish(reason=pb.FINISH_REASON_CANCELLED))
    chunk = pb.Chunk()
    assert place.take_chunks(lambda: chunk, 9) == 0
    assert (chunk.position, chunk.text, chunk.finish.reason) == (2, "B", pb.FINISH_REASON_CANCELLED)


def test_a_reader_takes_of_samples_that_came_after_it_and_then_hears_of_the_end() -> None:
    stream = OutputStream(pb.Accepted(max_tokens=8, num_samples=2), pb.OutputParams(), [])
    place = Subscription(stream, (), lambda _: None, lambda _: None)
    for number in (1, 2):
        stream.samples.append(growing(*[0] * number).stream)
        stream.samples[-1].close(pb.SampleFinish(reason=pb.FINISH_REASON_LENGTH))
        chunks = pb.SessionResponse()
        assert place.take_chunks(lambda chunks=chunks: chunks.events.add().chunk, 9) == number  # type: ignore[misc]
        assert [event.chunk.index for event in chunks.events] == [number - 1]
    assert not place.has_news and not place.done
    stream.close(pb.Finished())
    assert place.has_news and place.done


def test_log_probabilities_of_a_prompt_come_once_with_the_first_sample_and_count() -> None:
    samples = [growing(0, 0).stream, growing(0, 0).stream]
    of_prompt = [pb.TokenLogprobs(token_id=each) for each in (7, 8, 9)]
    wanted = pb.OutputParams(prompt_logprobs=0)
    stream = OutputStream(pb.Accepted(max_tokens=8, num_samples=2), wanted, samples, of_prompt)
    place = Subscription(stream, (), lambda _: None, lambda _: None)
    samples[1].num_released = 1
    chunks = pb.SessionResponse()
    assert place.take_chunks(lambda: chunks.events.add().chunk, 9) == 1
    samples[0].num_released = samples[1].num_released = 2
    assert place.take_chunks(lambda: chunks.events.add().chunk, 9) == 2 + 3 + 1
    assert not place.take_chunks(lambda: chunks.events.add().chunk, 9)
    found = [(event.chunk.index, event.chunk.position, len(event.chunk.prompt_logprobs)) for event in chunks.events]
    assert found == [(1, 0, 0), (0, 0, 3), (1, 1, 0)]
    again = pb.SessionResponse()
    from_second = Subscription(stream, (1,), lambda _: None, lambda _: None)
    from_second.take_chunks(lambda: again.events.add().chunk, 9)
    assert [len(event.chunk.prompt_logprobs) for event in again.events] == [0, 0], "it has had the first token"


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_who_is_ahead_of_an_output_that_ended_shorter_gets_its_end_and_nothing_again(num_tokens: int) -> None:
    text = GrowingText()
    sample = SampleStream(text)
    accepted = pb.Accepted(max_tokens=8, num_samples=1)
    stream = OutputStream(accepted, pb.OutputParams(token_ids=True, logprobs=0), [sample])
    place = Subscription(stream, [5], lambda _: None, lambda _: None)
    for token_id in range(num_tokens):
        sample.token_ids.append(token_id)
        sample.add_logprobs([pb.TokenLogprobs(token_id=token_id)])
        text.push(token_id, 0)
    sample.num_released = num_tokens
    assert not place.has_news
    sample.close(pb.SampleFinish(reason=pb.FINISH_REASON_CANCELLED))
    stream.close(pb.Finished())
    chunks = pb.SessionResponse()
    assert place.take_chunks(lambda: chunks.events.add().chunk, 100) == 0
    assert [event.chunk for event in chunks.events] == [
        pb.Chunk(position=5, finish=pb.SampleFinish(reason=pb.FINISH_REASON_CANCELLED))
    ]
    assert place.done
