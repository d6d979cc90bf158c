"""Length of a chat before it is tokenised: each text in it counts, wherever it stands."""

from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.params.chat_prompt import num_chars_of


def text(exponent: int) -> str:
    """Build a text of so many characters that a sum of some of them tells which."""
    return "é" * 2**exponent


def test_every_text_of_a_chat_counts_once_by_its_characters() -> None:
    call, other = (pb.ToolCall(id=text(i), name=text(i + 1), arguments=text(i + 2)) for i in (0, 3))
    asking = pb.ChatMessage(role=text(6), content=text(7), reasoning=text(8), tool_calls=[call, other])
    answer = pb.ChatMessage(role=text(9), name=text(10), tool_call_id=text(11))
    chat = pb.ChatPrompt(messages=[asking, answer], tools=text(12), template_kwargs=text(13))
    assert num_chars_of(chat) == 2**14 - 1
    assert num_chars_of(pb.ChatPrompt(messages=[answer])) == 2**9 + 2**10 + 2**11
