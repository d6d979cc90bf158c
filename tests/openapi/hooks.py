"""Hooks of schemathesis: most bodies are fitted to the model that is served, and outputs are kept short.

A schema cannot name the served model or its vocabulary, so nearly all bodies made of it alone would be refused. One of
four is sent as it was made. Loaded by schemathesis, in its own process.
"""

from collections import deque
from typing import Any

import schemathesis

MODEL = "demo"
_MOST_TOKENS = 4
_CONTEXT = 2048  # more is refused by itself
_VOCABULARY = 256  # of which each model has more
_BOUNDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_EITHER = ("/tokenize", "/prefixes/{name}")  # a prompt or messages
_ids: deque[str] = deque(maxlen=8)
_STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
_OPENAIS = ("/completions", "/chat/", "/responses")  # paths of OpenAI's document, which has them without the version
_ITEMS = ("message", "reasoning", "function_call", "function_call_output", "item_reference")  # that we know
_TEXT = "One day a small puppy " * 8  # more than a block of tokens
_TOKEN_IDS = ("prompt", "tokens", "stop_token_ids", "allowed_token_ids")
# What this model cannot do, or what contradicts other fields more often than not.
_RARELY = (
    *("tools", "tool_choice", "structured_outputs", "response_format", "output_config", "text", "beam_width"),
    *("length_penalty", "early_stopping", "best_of", "first_sample_index", "min_tokens", "continue_final_message"),
    *("audio", "conversation", "context_management", "functions", "function_call", "modalities", "moderation"),
    *("background_options", "access_programs", "prediction", "web_search_options", "personality", "suffix"),
    *("previous_response_id", "timeout_s", "chat_template_kwargs", "thinking", "logit_bias"),
)


def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Change a case before it is sent."""
    body, path = case.body, case.operation.path
    if path.startswith(_OPENAIS):
        path = f"/v1{path}"
    is_valid = case.meta is not None and case.meta.generation.mode.name == "POSITIVE"
    if is_valid and path.startswith("/requests/{request_id}") and _ids:
        case.path_parameters["request_id"] = _ids[len(repr(case.path_parameters)) % len(_ids)]
    if is_valid and path == "/v1/models/{name}" and len(repr(case.path_parameters)) % 2:
        case.path_parameters["name"] = MODEL
    if not isinstance(body, dict):
        return
    _shorten(body, path)
    if is_valid and len(repr(body)) % 4:
        _fit(body, path)
        if isinstance(kwargs.get("headers"), dict):
            kwargs["headers"].pop("last-event-id", None)
        if case.headers:
            case.headers.pop("last-event-id", None)


def after_call(context: Any, case: Any, response: Any) -> None:
    """Remember the ids of the last requests, for calls that name one."""
    given = [value for name in ("x-request-id", "request-id") for value in response.headers.get(name, ())]
    if response.status_code == 200 and given:
        _ids.append(given[0])


def _shorten(body: dict[str, Any], path: str) -> None:
    for name in _BOUNDS:
        if isinstance(body.get(name), int) and _MOST_TOKENS < body[name] <= _CONTEXT:
            body[name] = _MOST_TOKENS
    if path == "/v1/chat/completions" and body.get("max_completion_tokens", body.get("max_tokens")) is None:
        body["max_completion_tokens"] = _MOST_TOKENS
    if path == "/v1/responses":
        body.setdefault("max_output_tokens", _MOST_TOKENS)
        if body["max_output_tokens"] is None:
            body["max_output_tokens"] = _MOST_TOKENS


def _fit(body: dict[str, Any], path: str) -> None:
    for name, value in body.items():
        if isinstance(value, float) and value.is_integer():
            body[name] = int(value)  # 1.0 is an integer in JSON Schema, and no number of tokens
    for name in _RARELY:
        if len(repr(body)) % 8:
            body.pop(name, None)
    if "model" in body:
        body["model"] = MODEL
    for name in _TOKEN_IDS:
        if isinstance(body.get(name), list):
            body[name] = [_token_id(each) for each in body[name]]
    if len(repr(body)) % 3 == 0 and path in _STREAMED:
        body["stream"] = True
    if isinstance(body.get("n"), int):
        body["n"] = 1 + body["n"] % 3
    if "top_logprobs" in body and "logprobs" in body:
        body["logprobs"] = True
    for name in _BOUNDS:
        if isinstance(body.get(name), int):
            body[name] = 1 + body[name] % _MOST_TOKENS
    if path in _EITHER:
        body.pop("messages" if body.get("prompt") is not None or len(repr(body)) % 2 else "prompt", None)
        if "messages" not in body:
            body["prompt"] = _TEXT
    if path.startswith("/v1/responses") and not isinstance(body.get("input"), str):
        known = [each for each in _list(body, "input") if isinstance(each, dict) and each.get("type") in _ITEMS]
        body["input"] = known if known and len(repr(body)) % 3 == 0 else _TEXT
    for turn in (*_list(body, "messages"), *_list(body, "input")):
        if isinstance(turn, dict) and turn.get("role") in ("developer", "tool"):
            turn["role"] = "user"


def _list(body: dict[str, Any], name: str) -> list[Any]:
    given = body.get(name)
    return given if isinstance(given, list) else []


def _token_id(given: Any) -> Any:
    if isinstance(given, list):
        return [_token_id(each) for each in given]
    return given % _VOCABULARY if isinstance(given, int) else given


schemathesis.hook(before_call)
schemathesis.hook(after_call)
