"""One sample by itself: its text token by token, what of it is settled, and the context that its text continues."""

from collections.abc import Sequence

import pytest

from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.live.live_sample import LiveSample, context_of
from scheduler_svc.text.tokenizer import ModelTokenizer
from tests.scheduler.live_requests import live, logprob_of, settle
from tests.scheduler.request_settling import request_of
from tests.scheduler.text_tokenizers import MARKERS, byte_level_json, ours

TOKENIZER = ours(byte_level_json())
WORDS = TOKENIZER.encode("It was the best of times, it was the worst of times. 你好 The lazy dog sleeps.", False)
MARKER = TOKENIZER.encode(MARKERS[0], False)  # one token, without text
STOP_TOKEN = TOKENIZER.encode("z", False)[0]


def context(prompt: list[int], *, keep_special_tokens: bool = False) -> list[int]:
    return context_of(prompt, TOKENIZER, keep_special_tokens=keep_special_tokens)


def test_the_context_is_the_last_sixteen_tokens_that_have_text() -> None:
    assert len(WORDS) > 20 and len(MARKER) == 1
    assert context(WORDS) == WORDS[-16:]
    assert context(WORDS + MARKER) == WORDS[-16:]
    assert context(WORDS + MARKER * 100) == WORDS[-16:]
    assert context(WORDS[:5] + MARKER) == WORDS[:5]
    assert context(MARKER * 3) == []


def test_a_marker_that_is_kept_is_context_as_any_other_token() -> None:
    assert context(WORDS + MARKER * 10, keep_special_tokens=True) == WORDS[-6:] + MARKER * 10


def test_no_more_than_a_thousand_tokens_are_looked_at() -> None:
    assert context(WORDS + MARKER * 1022) == WORDS[-2:]
    assert context(WORDS + MARKER * 1024) == []


class NotedTokenizer(ModelTokenizer):
    """Remembers at how many tokens it looked."""

    looked_at: list[int]

    def with_text(self, token_ids: Sequence[int], keep_special_tokens: bool) -> list[int]:
        self.looked_at.append(len(token_ids))
        return super().with_text(token_ids, keep_special_tokens)


@pytest.mark.parametrize(
    ("prompt", "expected"), [(WORDS * 9, [16]), (WORDS[:5] + MARKER, [6]), (WORDS + MARKER, [16, len(WORDS) + 1])]
)
def test_more_of_a_prompt_is_looked_at_only_where_its_end_lacks_text(prompt: list[int], expected: list[int]) -> None:
    tokenizer = NotedTokenizer(byte_level_json(), "", {})
    tokenizer.looked_at = []
    context_of(prompt, tokenizer, keep_special_tokens=False)
    assert tokenizer.looked_at == expected


def sample_of(**stopping: object) -> LiveSample:
    request = request_of(
        stopping=pb.StoppingParams(stop_token_ids=[STOP_TOKEN], **stopping),  # type: ignore[arg-type]
        output=pb.OutputParams(logprobs=0),
    )
    return live(request, WORDS[:5], TOKENIZER).samples[0]


@pytest.mark.parametrize("include_stop", [False, True])
def test_the_token_that_ends_a_sample_has_text_only_if_it_was_asked_for(include_stop: bool) -> None:
    sample = sample_of(include_stop=include_stop)
    sample.token_ids.extend([*WORDS[5:8], STOP_TOKEN])
    sample.finish = pb.SampleFinish(reason=pb.FINISH_REASON_STOP, stop_token_id=STOP_TOKEN)
    assert sample.push_text() is None
    whole = TOKENIZER.decode([*WORDS[:8], *([STOP_TOKEN] if include_stop else [])], False)
    assert sample.text.text == whole.removeprefix(TOKENIZER.decode(WORDS[:5], False))
    assert len(sample.text.released_ends) == 4


def test_a_token_that_is_no_cause_of_the_end_has_text() -> None:
    sample = sample_of()
    sample.token_ids.extend(WORDS[5:8])
    sample.push_text()
    before = sample.text.text
    sample.token_ids.extend(WORDS[8:9])
    sample.finish = pb.SampleFinish(reason=pb.FINISH_REASON_LENGTH)
    sample.push_text()
    assert before and sample.text.text == before + TOKENIZER.decode(WORDS[8:9], False)
    sample.push_text()
    assert len(sample.text.released_ends) == 4, "made once"


def test_text_is_held_back_until_no_token_follows() -> None:
    """Text that begins as a stop string does."""
    for is_last, finish in ((True, None), (False, pb.SampleFinish(reason=pb.FINISH_REASON_LENGTH))):
        sample = sample_of(stop=["mes."])
        sample.token_ids.extend(TOKENIZER.encode("me", False))
        assert sample.push_text() is None and sample.text.text == ""
        sample.finish = finish
        assert sample.push_text(is_last=is_last) is None
        assert sample.text.text == "me"


@pytest.mark.parametrize("is_last", [False, True])
def test_a_stop_string_that_a_token_completes_is_told(is_last: bool) -> None:
    sample = sample_of(stop=["mes"])
    sample.token_ids.extend(TOKENIZER.encode("times", False))
    assert sample.push_text(is_last=is_last) == "mes" and sample.text.text == "ti"


def test_tokens_and_their_log_probabilities_are_settled_once() -> None:
    sample = sample_of()
    sample.token_ids.extend([20, 21])
    sample.pending_logprobs = (logprob_of(20), logprob_of(21))
    assert (sample.settle_tokens(), [each.token_id for each in sample.settle_logprobs()]) == ([20, 21], [20, 21])
    assert (sample.settle_tokens(), list(sample.settle_logprobs())) == ([], [])
    sample.token_ids.append(22)
    sample.pending_logprobs = (logprob_of(22),)
    assert (sample.settle_tokens(), [each.token_id for each in sample.settle_logprobs()]) == ([22], [22])
    assert sample.stream.token_ids == [each.token_id for each in sample.stream.logprobs] == [20, 21, 22]


def test_tokens_behind_the_last_one_with_text_are_dropped_with_their_log_probabilities() -> None:
    sample = sample_of()
    settle(sample, *WORDS[5:7], logprobs=[-1.0, -2.0])
    sample.token_ids.extend(WORDS[7:8])
    sample.push_text()
    sample.token_ids.extend(WORDS[8:10])  # that have none
    sample.pending_logprobs = tuple(logprob_of(each) for each in WORDS[7:10])
    sample.finish = pb.SampleFinish(reason=pb.FINISH_REASON_FAILED)
    sample.drop_tokens_without_text()
    assert sample.token_ids == WORDS[:8] and sample.num_tokens == 3
    assert [each.token_id for each in sample.pending_logprobs] == WORDS[7:8]
