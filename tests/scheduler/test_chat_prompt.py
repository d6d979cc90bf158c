"""Chats before they are tokenised: each text in them counts, wherever it stands, and how the answer begins is clear."""

import pytest

from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.params.chat_prompt import num_chars_of
from tests.scheduler.request_settling import refused, request_of, settled


def text(exponent: int) -> str:
    """Build a text of so many characters that a sum of some of them tells which."""
    return "é" * (1 << exponent)


def test_every_text_of_a_chat_counts_once_by_its_characters() -> None:
    call, other = (pb.ToolCall(id=text(i), name=text(i + 1), arguments=text(i + 2)) for i in (0, 3))
    asking = pb.ChatMessage(role=text(6), content=text(7), reasoning=text(8), tool_calls=[call, other])
    answer = pb.ChatMessage(role=text(9), name=text(10), tool_call_id=text(11))
    chat = pb.ChatPrompt(messages=[asking, answer], tools=text(12), template_kwargs=text(13))
    assert num_chars_of(chat) == 2**14 - 1
    assert num_chars_of(pb.ChatPrompt(messages=[answer])) == 2**9 + 2**10 + 2**11


@pytest.mark.parametrize("opens_answer", [True, False, None])
@pytest.mark.parametrize("continues", [True, False])
def test_an_answer_is_either_begun_or_continued(opens_answer: bool | None, continues: bool) -> None:
    messages = [pb.ChatMessage(role="user", content="a"), pb.ChatMessage(role="assistant", content="b")]
    chat = pb.ChatPrompt(messages=messages, add_generation_prompt=opens_answer, continue_final_message=continues)
    if opens_answer and continues:
        assert list(refused(request_of(chat=chat))) == ["chat.continue_final_message"]
    else:
        assert settled(request_of(chat=chat))
