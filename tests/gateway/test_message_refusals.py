"""Refusals of tools, thinking and their blocks in messages, by the paths of the fields."""

from typing import Any

import anthropic
import httpx2
import pytest

from tests.gateway.reciter import MODEL, asking
from tests.gateway.test_message_errors import error_of
from tests.gateway.test_message_tools import FLAT, RAW, result, text, thinking, use


@pytest.fixture(scope="module")
def deployment(reciter: tuple[str, str]) -> tuple[str, str]:
    """Addresses of the scheduler and of the gateway."""
    return reciter


def after_call(*content: dict[str, Any]) -> list[dict[str, Any]]:
    """Messages of a question, a call, and this content of the user."""
    call = {**use("weather", {"city": "Rome"}), "id": "toolu_a"}
    return [*asking("call"), {"role": "assistant", "content": [call]}, {"role": "user", "content": [*content]}]


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: this server does not"),
        ({"tools": [*FLAT, {"type": "bash_20250124", "name": "bash"}]}, "tools[1].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": [], "type": "custom"}]}, "tools[0].input_schema"),
        (
            {"tools": [*FLAT, {"name": "f", "input_schema": {"type": "fish"}, "strict": True}]},
            "tools[1].input_schema: cannot be used: Invalid type: fish",
        ),
        ({"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{"name": "f", "input_schema": {}, "parameters": {}}]}, "tools[0].parameters"),
        (
            {"tools": [{"name": "f", "input_schema": {"type": "fish"}}], "tool_choice": {"type": "any"}},
            "tools[0].input_schema: cannot be used: Invalid type: fish",
        ),
        ({"tools": FLAT * 129}, "tools"),
        ({"tools": None, "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any", "name": "weather"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "tides"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}, "structured_outputs": {"choice": ["x"]}}, "tool_choice"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 2048}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "display": "omitted"}}, "thinking.display"),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": after_call(result("toolu_b"))}, "messages[2].content[0].tool_use_id"),
        (
            {"messages": after_call(text("x"), result("toolu_a", content=[{"type": "image"}]))},
            "content[1].content[0].type",
        ),
        ({"messages": after_call({"type": "tool_result"})}, "messages[2].content[0].tool_use_id"),
        ({"messages": after_call({**use("weather", {}), "id": "x"})}, "messages[2].content[0].type"),
        ({"messages": after_call(thinking("x", "y"))}, "messages[2].content[0].type"),
        ({"messages": after_call()[:2]}, "messages[1].content: the last message ends with no text"),
        (
            {"messages": [{"role": "assistant", "content": [result("toolu_a")]}, *asking("x")]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "assistant", "content": [use("weather", {})]}]}, "messages[0].content[0].id"),
        ({"messages": after_call({"type": "server_tool_use", "id": "x"})}, "messages[2].content[0].type"),
        ({"messages": after_call({"type": ["text"]})}, "messages[2].content[0].type"),
        ({"system": [result("toolu_a")]}, "system[0].type"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(http: httpx2.Client, extra: dict[str, Any], named: str) -> None:
    status, kind, message = error_of(http.post("/v1/messages", json=RAW | extra))
    assert (status, kind) == (400, "invalid_request_error")
    assert named in message


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ],
)
def test_tokens_are_not_counted_of_what_is_refused(claude: anthropic.Anthropic, refused: Any, named: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.count_tokens(model=MODEL, messages=asking("?"), **refused)
    assert named in caught.value.message


def test_a_thread_is_refused_in_the_form_after_which_anthropics_client_goes_on(http: httpx2.Client) -> None:
    answer = http.post("/v1/messages?beta=true", json=RAW | {"thread": {"type": "create"}})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert error["message"].startswith("thread:")
