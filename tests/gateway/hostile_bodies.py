"""Routes that take a body, each with one that is accepted, and the check that an answer is in its API's shape."""

from typing import Any

import httpx2

from tests.gateway.conftest import MODEL

TURNS = [{"role": "user", "content": "Hi"}]
# A body of each route, by method and path; it is answered quickly.
BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "/v1/completions"): {"model": MODEL, "prompt": "x", "max_tokens": 1},
    ("POST", "/v1/chat/completions"): {"model": MODEL, "messages": TURNS, "max_completion_tokens": 1},
    ("POST", "/v1/responses"): {"model": MODEL, "input": "x", "max_output_tokens": 1},
    ("POST", "/v1/responses/input_tokens"): {"model": MODEL, "input": "x"},
    ("POST", "/v1/responses/compact"): {"model": MODEL, "input": "x", "timeout_s": 20},
    ("POST", "/v1/messages"): {"model": MODEL, "messages": TURNS, "max_tokens": 1},
    ("POST", "/v1/messages/count_tokens"): {"model": MODEL, "messages": TURNS},
    ("POST", "/tokenize"): {"model": MODEL, "prompt": "x"},
    ("POST", "/detokenize"): {"model": MODEL, "tokens": [5]},
    ("POST", "/requests/{request_id}/pause"): {"keep": "auto"},
    ("PUT", "/prefixes/{name}"): {"prompt": "One day " * 20, "tenant": "hostile"},
}
# Codes of errors that tell of what the model wrote, which is drawn: no fault of the gateway.
NO_SUMMARY = ("no_summary", "summary_too_long")


def place(path: str) -> str:
    """The path of a route with a value for its parameter."""
    return path.replace("{request_id}", "nobody").replace("{name}", "hostile")


def check_answer(answer: httpx2.Response) -> None:
    """Fails for a fault of the gateway, and for an error in another shape than its API's."""
    shown = f"{answer.request.method} {answer.request.url}: {answer.status_code} {answer.text[:300]}"
    assert answer.status_code < 500 or answer.json()["error"]["code"] in NO_SUMMARY, shown
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == "application/json", shown
        body = answer.json()
        assert body["error"]["message"], shown
        assert body["error"]["type"], shown
        if answer.request.url.path.startswith("/v1/messages"):
            assert body["type"] == "error", shown
            assert body["request_id"], shown
        else:
            assert {"param", "code"} <= body["error"].keys(), shown
