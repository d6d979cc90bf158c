"""Meaning that no schema has: bodies that name the served model, know its vocabulary, and do not contradict themselves.

Sends nothing.
"""

from typing import Any
from zlib import crc32

MODEL = "demo"
_MOST_TOKENS = 4
_CONTEXT = 2048  # more is refused by itself
_VOCABULARY = 256  # of which each model has more
_BOUNDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_LEAST_TIMEOUT_S = 60  # a deadline that passes is answered as it should be, with a 5xx
_LEAST_TOP_P = 0.01  # as less may be 0 on the wire
_TEXT = "One day a small puppy " * 8  # more than a block of tokens
_TURNS = [{"role": "user", "content": _TEXT}]
_TOKEN_IDS = ("prompt", "tokens", "stop_token_ids", "allowed_token_ids")
_EITHER = ("/tokenize", "/prefixes/{name}")  # a prompt or messages
_STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
_NEEDED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": _TEXT},
    "/v1/chat/completions": {"messages": _TURNS},
    "/v1/messages": {"messages": _TURNS, "max_tokens": _MOST_TOKENS},
    "/v1/messages/count_tokens": {"messages": _TURNS},
    "/v1/responses": {"input": _TEXT},
    "/v1/responses/input_tokens": {"input": _TEXT},
    "/v1/responses/compact": {"input": _TEXT},
    "/detokenize": {"tokens": [1, 2]},
}
# What this model cannot do, or what contradicts other fields more often than not.
_RARELY = (
    *("tools", "tool_choice", "structured_outputs", "response_format", "output_config", "text", "beam_width"),
    *("length_penalty", "early_stopping", "best_of", "first_sample_index", "min_tokens", "continue_final_message"),
    *("previous_response_id", "timeout_s", "chat_template_kwargs", "thinking", "logit_bias"),
)


def shorten(body: dict[str, Any], path: str) -> None:
    """Keep outputs short and deadlines far, also of a body that is sent as it was made."""
    timeout_s = body.get("timeout_s")
    if isinstance(timeout_s, int | float) and 0 < timeout_s < _LEAST_TIMEOUT_S:
        body["timeout_s"] = _LEAST_TIMEOUT_S
    for name in _BOUNDS:
        if isinstance(body.get(name), int) and _MOST_TOKENS < body[name] <= _CONTEXT:
            body[name] = _MOST_TOKENS
    if path == "/v1/chat/completions" and body.get("max_completion_tokens", body.get("max_tokens")) is None:
        body["max_completion_tokens"] = _MOST_TOKENS
    if path == "/v1/responses" and body.get("max_output_tokens") is None:
        body["max_output_tokens"] = _MOST_TOKENS


def make_sense(body: dict[str, Any], path: str, number: int) -> dict[str, Any]:
    """A body of valid fields that is mostly answered. `number` decides what is left to chance."""
    made = {name: value for name, value in body.items() if name not in _RARELY or not _draw(name, number, 8)}
    for name, value in _NEEDED.get(path, {}).items():
        if not made.get(name):
            made[name] = value
    if "model" in made:
        made["model"] = MODEL
    for name in _TOKEN_IDS:
        if isinstance(made.get(name), list):
            made[name] = [_token_id(each) for each in made[name]]
    for name in _BOUNDS:
        if isinstance(made.get(name), int):
            made[name] = 1 + made[name] % _MOST_TOKENS
    if isinstance(made.get("n"), int):
        made["n"] = 1 + made["n"] % 3
        made["temperature"] = 1
    if isinstance(made.get("top_p"), int | float):
        made["top_p"] = max(made["top_p"], _LEAST_TOP_P)
    if path in _STREAMED and not _draw("stream", number, 3):
        made["stream"] = True
    _agree(made, path, number)
    return made


def _agree(made: dict[str, Any], path: str, number: int) -> None:
    """Have fields agree with each other."""
    if path in _EITHER:
        made.pop("messages" if made.get("prompt") is not None or _draw("messages", number, 2) else "prompt", None)
        if "messages" not in made:
            made["prompt"] = _TEXT
    if path == "/v1/chat/completions" and made.get("top_logprobs") is not None:
        made["logprobs"] = True
    if made.get("stream"):
        made.pop("prompt_logprobs", None)  # of whole answers alone
    if path.startswith("/v1/responses"):
        made.pop("top_logprobs" if "include" not in made else "", None)
        if made.get("background"):
            made["store"] = True
    for turn in (*_list(made, "messages"), *_list(made, "input")):
        if isinstance(turn, dict) and turn.get("role") in ("developer", "tool"):
            turn["role"] = "user"


def _list(body: dict[str, Any], name: str) -> list[Any]:
    given = body.get(name)
    return given if isinstance(given, list) else []


def _token_id(given: Any) -> Any:
    if isinstance(given, list):
        return [_token_id(each) for each in given]
    return given % _VOCABULARY if isinstance(given, int) else given


def _draw(name: str, number: int, sides: int) -> int:
    """A number below `sides` for a field, the same for the same body."""
    return crc32(f"{name} {number}".encode()) % sides
