"""Thinking of messages, by Anthropic's own client: how it is asked for, comes back, and is sent again."""

from typing import Any

import anthropic
import pytest

import quire
from tests.gateway.reciter import asking
from tests.gateway.test_message_tools import CALL, ENABLED, GREEDY, blocks_of, prompt_of, streamed, text, thinking


@pytest.fixture(scope="module")
def deployment(reciter: tuple[str, str]) -> tuple[str, str]:
    """Addresses of the scheduler and of the gateway."""
    return reciter


def test_thinking_comes_back_shown_or_omitted_or_not_at_all(claude: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"messages": asking("?"), **GREEDY}
    on: list[Any] = [ENABLED, {"type": "adaptive"}, ENABLED | {"display": "summarized"}]
    shown = [blocks_of(claude.messages.create(**fields, thinking=each)) for each in on]
    assert shown[0] == shown[1] == shown[2] == [thinking("Hm: 2 + 2 it is.", shown[0][0]["signature"]), text("Four.")]
    omitted = fields | {"thinking": ENABLED | {"display": "omitted"}}
    with claude.messages.stream(**omitted) as stream:
        kinds = [event.delta.type for event in stream if event.type == "content_block_delta"]
        final = stream.get_final_message()
    assert "thinking_delta" not in kinds and kinds[0] == "signature_delta"
    assert blocks_of(final) == blocks_of(claude.messages.create(**omitted))
    assert blocks_of(final) == [thinking("", blocks_of(final)[0]["signature"]), text("Four.")]
    disabled: dict[str, Any] = CALL | {"thinking": {"type": "disabled"}}
    for message in (claude.messages.create(**disabled), streamed(claude, **disabled)):
        assert [each["type"] for each in blocks_of(message)] == ["text", "tool_use"]


def test_the_template_sees_thinking_that_comes_back_also_if_it_was_omitted(
    claude: anthropic.Anthropic, sdk: quire.Client
) -> None:
    fields: dict[str, Any] = {"messages": asking("?"), "thinking": ENABLED | {"display": "omitted"}, **GREEDY}
    omitted = claude.messages.create(**fields)
    foreign: list[Any] = [thinking("", "of another server"), {"type": "redacted_thinking", "data": "x"}, text("Four.")]
    unsigned: list[Any] = [
        {"type": "thinking", "thinking": "Hm.", "signature": None},
        text("Four."),
    ]  # as LiteLLM's are
    for content, reasoning in (
        (omitted.to_param()["content"], "Hm: 2 + 2 it is."),
        (foreign, ""),
        (unsigned, "Hm."),
        ([{"type": "thinking", "thinking": "Hm."}, text("Four.")], "Hm."),
    ):
        messages: list[Any] = [*asking("?"), {"role": "assistant", "content": content}, *asking("hello")]
        turns = [
            quire.ChatMessage("user", "?"),
            quire.ChatMessage("assistant", "Four.", reasoning=reasoning),
            quire.ChatMessage("user", "hello"),
        ]
        assert "assistant: Four." in prompt_of(claude, sdk, quire.Chat(messages=turns), messages=messages)


def test_thinking_effort_and_variables_reach_the_template(claude: anthropic.Anthropic, sdk: quire.Client) -> None:
    variables = {"enable_thinking": True, "reasoning_effort": "high"}
    chat = quire.Chat(messages=asking("?"), template_kwargs=variables)
    fields: dict[str, Any] = {"messages": asking("?"), "output_config": {"effort": "high"}}
    assert prompt_of(claude, sdk, chat, thinking=ENABLED, **fields).endswith("effort high<think>")
    fields["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False, "say": "hello"}}
    chat = quire.Chat(messages=asking("?"), template_kwargs={"say": "hello", "reasoning_effort": "high"})
    assert prompt_of(claude, sdk, chat, thinking=ENABLED, **fields).endswith("※hello※")
