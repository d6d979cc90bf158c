"""Refusals in OpenAI's shape, with the status, type, field and code that clients act on."""

from typing import Any

import httpx2
import openai
import pytest

import quire
from tests.gateway.conftest import MODEL
from tests.services import free_address, start_gateway

CHAT: list[Any] = [{"role": "user", "content": "Hello"}]


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.mark.parametrize(
    ("extra", "param", "code"),
    [
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"temperature": True}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 1000}, "n", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1_000_000}, "max_tokens", "context_length_exceeded"),
        ({"max_tokens": 2**40}, "max_tokens", "invalid_value"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value"),
        ({"stop": [""]}, "stop", "invalid_value"),
        ({"logit_bias": {"hello": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [[1], "x"]}, "prompt", "invalid_value"),
        ({"prompt": [-5]}, "prompt", "invalid_value"),
        ({"beam_width": 1}, "beam_width", "invalid_value"),
        ({"length_penalty": 2}, "beam_width", "invalid_value"),
        ({"early_stopping": True}, "beam_width", "invalid_value"),
        ({"tenant": "x" * 200}, "tenant", "invalid_value"),
        ({"stream_options": {"foo": 1}}, "stream_options.foo", "unknown_parameter"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(
    http: httpx2.Client, extra: dict[str, Any], param: str, code: str
) -> None:
    answer = http.post("/v1/completions", json={"model": MODEL, "prompt": "x"} | extra)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (400, "invalid_request_error", code)
    assert error["param"] == param or param in error["message"]


@pytest.mark.parametrize(
    ("extra", "param", "code"),
    [
        ({"prompt": [999_999_999], "echo": True}, "prompt[0]", "invalid_value"),
        ({"prompt": "x" * 200_000, "echo": True, "logprobs": 1}, "prompt", "context_length_exceeded"),
        ({"prompt": "x" * 200_000, "return_token_ids": True}, "prompt", "context_length_exceeded"),
        ({"prompt": "x" * 200_000, "add_special_tokens": False}, "prompt", "context_length_exceeded"),
    ],
)
def test_a_prompt_that_is_looked_at_by_itself_is_named_as_one(
    http: httpx2.Client, extra: dict[str, Any], param: str, code: str
) -> None:
    error = http.post("/v1/completions", json={"model": MODEL} | extra).json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"].startswith(f"{param}: ") or code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("extra", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_value"),
        ({"functions": []}, "functions", "unsupported_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_value"),
        ({"response_format": schema_format({"not": {}})}, "response_format", "invalid_value"),
        (
            {"response_format": schema_format({}), "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "invalid_value",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]", "invalid_value"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "invalid_value"),
        ({"max_completion_tokens": 10**7}, "max_completion_tokens", "context_length_exceeded"),
        ({"max_tokens": 10**7}, "max_tokens", "context_length_exceeded"),
        ({"max_tokens": 5, "max_completion_tokens": 10**7}, "max_completion_tokens", "context_length_exceeded"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(http: httpx2.Client, extra: dict[str, Any], param: str, code: str) -> None:
    answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": CHAT} | extra)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["code"] == code


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "hello " * 3000}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 3000}, "prompt"),
        ("/v1/completions", {"prompt": "x" * 200_000}, "prompt"),  # refused before it is tokenized
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello " * 3000}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 200_000}]}, "messages"),
        ("/v1/chat/completions", {"messages": CHAT * 3000}, "messages"),
        ("/v1/responses", {"input": "hello " * 3000}, "input"),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(
    http: httpx2.Client, path: str, body: dict[str, Any], field: str
) -> None:
    answer = http.post(path, json={"model": MODEL, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, field, "context_length_exceeded")
    assert "prompt is too long" in error["message"]  # Anthropic's and LangChain's
    assert "this model's maximum context length is 2,048 tokens" in error["message"]  # OpenAI's, vLLM's and LiteLLM's


def test_the_sdk_is_told_the_reason_of_a_prompt_that_is_too_long(sdk: quire.Client) -> None:
    for keywords in ({"prompt": [5] * 3000}, {"prompt": "x", "max_tokens": 5000}):
        with pytest.raises(quire.InvalidRequestError) as caught:
            sdk.generate(**keywords)
        assert [each.reason for each in caught.value.violations] == ["CONTEXT_LENGTH_EXCEEDED"]


@pytest.mark.parametrize(
    ("path", "prompt", "bound"),
    [
        ("/v1/completions", {"prompt": "x"}, "max_tokens"),
        ("/v1/chat/completions", {"messages": CHAT}, "max_completion_tokens"),
        ("/v1/chat/completions", {"messages": CHAT}, "max_tokens"),
        ("/v1/responses", {"input": "x"}, "max_output_tokens"),
    ],
)
@pytest.mark.parametrize("constraint", [{}, {"structured_outputs": {"regex": "a+"}}])
def test_a_refused_minimum_names_the_fields_of_the_api(
    http: httpx2.Client, path: str, prompt: dict[str, Any], bound: str, constraint: dict[str, Any]
) -> None:
    error = http.post(path, json={**prompt, **constraint, bound: 4, "min_tokens": 5}).json()["error"]
    assert error["param"] == "min_tokens"
    assert error["message"].startswith(f"min_tokens: is 5, more than {bound} (4): lower it or raise that")
    assert "structured_output," not in error["message"]


def test_a_field_that_is_null_counts_as_left_out(http: httpx2.Client) -> None:
    given = {"model": MODEL, "messages": CHAT, "max_tokens": 1, "tools": None, "temperature": None, "stop": None}
    assert http.post("/v1/chat/completions", json=given).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"[" * 10_000, b"{}"])
def test_a_body_that_is_no_request_is_refused(http: httpx2.Client, path: str, body: bytes) -> None:
    answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_another_model_is_not_found(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"'gpt-9' does not exist; this server has 'demo'"):
        api.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError, match="name of the model is empty; this server has 'demo'"):
        api.completions.create(model="", prompt="x")


def test_unknown_paths_and_methods_are_said_so(http: httpx2.Client) -> None:
    missing, wrong = http.get("/v1/images"), http.get("/v1/completions")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert missing.json()["error"]["message"] == "Not Found: GET /v1/images"


def test_a_body_beyond_the_bound_is_refused_whether_or_not_it_says_so(http: httpx2.Client) -> None:
    large = b'{"prompt": "' + b"x" * (17 << 20) + b'"}'
    declared = http.post("/v1/completions", content=large, headers={"content-type": "application/json"})
    assert (declared.status_code, declared.json()["error"]["code"]) == (413, "body_too_large")
    chunks = (large[start : start + 65_536] for start in range(0, len(large), 65_536))
    chunked = http.post("/v1/completions", content=chunks, headers={"content-type": "application/json"})
    assert chunked.status_code == 413


def test_without_a_scheduler_a_client_is_told_when_to_come_back() -> None:
    gateway, url = start_gateway(free_address(), "--scheduler-timeout-s", "0.5")
    with gateway, httpx2.Client(base_url=url, timeout=30) as http:
        answer = http.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "server_error"
        assert http.get("/health").status_code == 200
        assert http.get("/ready").status_code == 503
