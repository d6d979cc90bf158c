"""Hooks of schemathesis: most bodies are fitted to the model that is served, and outputs are kept short.

A schema cannot name the served model or its vocabulary, so nearly all bodies made of it alone would be refused. One of
four is sent as it was made. Loaded by schemathesis, in its own process.
"""

from typing import Any

import schemathesis

MODEL = "demo"
_MOST_TOKENS = 4
_CONTEXT = 2048  # more is refused by itself
_VOCABULARY = 256  # of which each model has more
_BOUNDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_TOKEN_IDS = ("prompt", "tokens", "stop_token_ids", "allowed_token_ids")
# What this model cannot do, or what contradicts other fields more often than not.
_RARELY = (
    *("tools", "tool_choice", "structured_outputs", "response_format", "output_config", "text", "beam_width"),
    *("length_penalty", "early_stopping", "best_of", "first_sample_index", "min_tokens", "continue_final_message"),
    *("previous_response_id", "timeout_s", "chat_template_kwargs", "thinking", "logit_bias"),
)


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Change a case before it is sent."""
    body = case.body
    if not isinstance(body, dict):
        return
    _shorten(body, case.operation.path)
    if case.meta is not None and case.meta.generation.mode.name == "POSITIVE" and len(repr(body)) % 4:
        _fit(body)


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


def _fit(body: dict[str, Any]) -> None:
    for name in _RARELY:
        if len(repr(body)) % 8:
            body.pop(name, None)
    if "model" in body:
        body["model"] = MODEL
    for name in _TOKEN_IDS:
        if isinstance(body.get(name), list):
            body[name] = [_token_id(each) for each in body[name]]
    if isinstance(body.get("n"), int):
        body["n"] = 1 + body["n"] % 3
    if "top_logprobs" in body and "logprobs" in body:
        body["logprobs"] = True


def _token_id(given: Any) -> Any:
    if isinstance(given, list):
        return [_token_id(each) for each in given]
    return given % _VOCABULARY if isinstance(given, int) else given
