"""Fields of vLLM's server: taken with the same meaning, or refused by name with what to give instead."""

from typing import Any

import httpx2
import openai
import pytest

import quire
from gateway_svc.openai.chat_request import ChatRequest
from gateway_svc.openai.completions import CompletionRequest
from gateway_svc.request_fields import RequestFields
from tests.gateway.conftest import MODEL

PROMPT = "Once upon a time there was a"
CHAT: list[Any] = [{"role": "user", "content": "Who are you?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": PROMPT, "max_tokens": 4},
    "/v1/chat/completions": {"model": MODEL, "messages": CHAT, "max_tokens": 4},
}
PATHS = list(BODIES)


def pairs(*names: tuple[str, Any, str], paths: list[str] = PATHS) -> list[Any]:
    return [pytest.param(path, *each, id=f"{path.split('/')[2]} {each[0]}") for path in paths for each in names]


@pytest.mark.parametrize(
    ("path", "name", "value", "instead"),
    [
        *pairs(
            ("use_beam_search", True, "beam_width"),
            ("bad_words", ["x"], "logit_bias"),
            ("spaces_between_special_tokens", False, "leave it out"),
            ("truncate_prompt_tokens", 5, "/tokenize"),
            ("truncation_side", "left", "/tokenize"),
            ("guided_json", {}, "structured_outputs.json"),
            ("guided_regex", "a", "structured_outputs.regex"),
            ("guided_choice", ["a"], "structured_outputs.choice"),
            ("guided_grammar", "a", "structured_outputs.grammar"),
            ("guided_json_object", True, "structured_outputs.json_object"),
            ("guided_whitespace_pattern", " ", "structured_outputs.json_whitespace"),
            ("guided_decoding_backend", "xgrammar", "leave it out"),
            ("request_id", "mine", "Idempotency-Key"),
            ("session_id", "mine", "session_key"),
            ("stream_interval", 8, "--stream-interval-ms"),
            ("thinking_token_budget", 8, "max_tokens"),
            ("logprob_token_ids", [1], "allowed_token_ids"),
            ("logits_processors", ["f"], "logit_bias"),
            ("kv_transfer_params", {}, "--role"),
            ("ec_transfer_params", {}, "leave it out"),
            ("vllm_xargs", {"a": 1}, "leave it out"),
            ("repetition_detection", {"max_pattern_size": 8}, "frequency_penalty"),
            ("watermarking", True, "leave it out"),
            ("routed_experts_prompt_start", 3, "leave it out"),
            ("return_token_offsets", True, "/tokenize"),
            ("return_mm_kwargs", False, "leave it out"),
        ),
        *pairs(("prompt_embeds", "AAAA", "token ids"), paths=["/v1/completions"]),
        *pairs(
            ("echo", True, "continue_final_message"),
            ("add_special_tokens", True, "chat template"),
            ("chat_template", "{{ messages }}", "/v1/completions"),
            ("return_prompt_text", True, "return_token_ids"),
            ("mm_processor_kwargs", {}, "leave it out"),
            paths=["/v1/chat/completions"],
        ),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_give_instead(
    http: httpx2.Client, path: str, name: str, value: Any, instead: str
) -> None:
    answer = http.post(path, json=BODIES[path] | {name: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
    assert instead in error["message"]
    assert http.post(path, json=BODIES[path] | {name: None}).status_code == 200


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("disable_any_whitespace", False, "json_whitespace"),
        ("whitespace_pattern", " ", "json_whitespace"),
        ("disable_additional_properties", True, "additionalProperties"),
        ("disable_fallback", True, "leave it out"),
        ("structural_tag", "{}", "tool_choice"),
    ],
)
def test_what_a_structured_output_cannot_have_is_refused_alike(
    http: httpx2.Client, name: str, value: Any, instead: str
) -> None:
    body = BODIES["/v1/completions"] | {"structured_outputs": {"regex": "a", name: value}}
    error = http.post("/v1/completions", json=body).json()["error"]
    assert (error["param"], error["code"]) == (f"structured_outputs.{name}", "unsupported_parameter")
    assert instead in error["message"]
    taken = {"disable_any_whitespace": True, "disable_additional_properties": False, "whitespace_pattern": None}
    body["structured_outputs"] = {"regex": "a", **taken}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "a"


def test_a_grammar_in_another_syntax_is_refused_with_the_one_that_is_taken(http: httpx2.Client) -> None:
    body = BODIES["/v1/completions"] | {"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}
    error = http.post("/v1/completions", json=body).json()["error"]
    assert error["param"] == "structured_outputs" and "Lark's syntax" in error["message"]


DEFAULTS: dict[str, Any] = {
    "use_beam_search": False,
    "bad_words": [],
    "spaces_between_special_tokens": True,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "early_stopping": False,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "stop": [],
    "logit_bias": {},
    "priority": 0,
    "n": 1,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "thinking_token_budget": -1,
    "stream_interval": 1,
    "watermarking": None,
    "routed_experts_prompt_start": 0,
    "return_token_offsets": False,
    "return_mm_kwargs": True,
    "response_format": {"type": "text"},
}


@pytest.mark.parametrize("path", PATHS)
def test_the_values_that_vllm_has_by_default_change_nothing(http: httpx2.Client, path: str) -> None:
    of_chats = {"add_special_tokens": False, "logprobs": False, "top_logprobs": 0}
    own = {"add_special_tokens": True} if path == "/v1/completions" else of_chats
    body = BODIES[path] | {"temperature": 0}
    plain, given = (http.post(path, json=body | more).json() for more in ({}, DEFAULTS | own | {"echo": False}))
    assert plain["choices"] == given["choices"]


def test_harmless_fields_reach_no_parameter_of_the_sdk() -> None:
    for kind, body in ((CompletionRequest, {"prompt": "x"}), (ChatRequest, {"messages": CHAT})):
        made: RequestFields = kind.model_validate(body | {"use_beam_search": False, "bad_words": [], "vllm_xargs": {}})
        assert made.params("id") == kind.model_validate(body).params("id")


def test_log_probabilities_of_a_prompt_are_those_of_its_echo(api: openai.OpenAI) -> None:
    more = {"prompt_logprobs": 2, "return_token_ids": True}
    (choice,) = api.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=1, logprobs=2, echo=True, temperature=0, extra_body=more
    ).choices
    found: list[Any] = choice.model_dump()["prompt_logprobs"]
    ids: list[int] = choice.model_dump()["prompt_token_ids"]
    assert found[0] is None and len(found) == len(ids)
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    scores = [each[str(token_id)]["logprob"] for each, token_id in zip(found[1:], ids[1:], strict=True)]
    assert scores == pytest.approx(choice.logprobs.token_logprobs[1:-1])
    for each, token_id in zip(found[1:], ids[1:], strict=True):
        ranks = sorted(of["rank"] for of in each.values())
        assert ranks[:2] == [1, 2] and len(each) == 2 + (each[str(token_id)]["rank"] > 2)
        best = max(of["logprob"] for of in each.values())
        assert next(of for of in each.values() if of["rank"] == 1)["logprob"] == best


def test_log_probabilities_of_a_conversation_have_an_entry_for_each_token(http: httpx2.Client) -> None:
    path = "/v1/chat/completions"
    answer = http.post(path, json=BODIES[path] | {"prompt_logprobs": 0}).json()
    found = answer["prompt_logprobs"]
    assert len(found) == answer["usage"]["prompt_tokens"] and found[0] is None
    assert all(len(each) == 1 for each in found[1:])
    refused = http.post(path, json=BODIES[path] | {"prompt_logprobs": 0, "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize("path", PATHS)
def test_token_ids_of_a_prompt_come_with_those_of_its_output(http: httpx2.Client, path: str) -> None:
    body = BODIES[path]
    asked = {name: body[name] for name in ("prompt", "messages") if name in body}
    expected = http.post("/tokenize", json=asked).json()["tokens"]
    answer = http.post(path, json=body | {"return_token_ids": True, "n": 2, "seed": 1}).json()
    of_prompts = [answer, *answer["choices"]]
    assert [each["prompt_token_ids"] for each in of_prompts if "prompt_token_ids" in each] == [expected] * (
        2 if path == "/v1/completions" else 1
    )


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_has_the_token_ids_of_its_prompt_once(api: openai.OpenAI, http: httpx2.Client, path: str) -> None:
    asked = {name: value for name, value in BODIES[path].items() if name in ("prompt", "messages")}
    expected = http.post("/tokenize", json=asked).json()["tokens"]
    more = {"return_token_ids": True}
    given = BODIES[path] | {"stream": True, "extra_body": more}
    create: Any = api.completions.create if path == "/v1/completions" else api.chat.completions.create
    events = [each.model_dump() for each in create(**given)]
    of_prompts = [each for event in events for each in (event, *event["choices"])]
    assert [each["prompt_token_ids"] for each in of_prompts if each.get("prompt_token_ids")] == [expected]
    first = events[0] if path == "/v1/chat/completions" else events[0]["choices"][0]
    assert first["prompt_token_ids"] == expected


def test_tokens_may_be_named_by_their_ids(http: httpx2.Client) -> None:
    more = {"return_tokens_as_token_ids": True, "return_token_ids": True, "temperature": 0}
    completion = http.post("/v1/completions", json=BODIES["/v1/completions"] | more | {"logprobs": 1}).json()
    (choice,) = completion["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{each}" for each in choice["token_ids"]]
    assert [list(each) for each in choice["logprobs"]["top_logprobs"]] == [
        [each] for each in choice["logprobs"]["tokens"]
    ]
    path = "/v1/chat/completions"
    chat = http.post(path, json=BODIES[path] | more | {"logprobs": True, "top_logprobs": 1}).json()
    (choice,) = chat["choices"]
    named = [f"token_id:{each}" for each in choice["token_ids"]]
    assert [each["token"] for each in choice["logprobs"]["content"]] == named
    assert [each["top_logprobs"][0]["token"] for each in choice["logprobs"]["content"]] == named


def test_a_completion_may_begin_without_special_tokens(http: httpx2.Client, sdk: quire.Client) -> None:
    body = BODIES["/v1/completions"] | {"temperature": 0, "add_special_tokens": False, "return_token_ids": True}
    answer = http.post("/v1/completions", json=body).json()
    expected = sdk.tokenize(PROMPT, add_special_tokens=False).token_ids
    assert answer["usage"]["prompt_tokens"] == len(expected)
    assert answer["choices"][0]["prompt_token_ids"] == list(expected)
    assert answer["choices"][0]["text"] == sdk.generate(list(expected), max_tokens=4, temperature=0).text


def test_an_included_stop_is_text_of_the_stop_string_and_of_special_tokens_only_if_these_are(
    http: httpx2.Client,
) -> None:
    body = BODIES["/v1/completions"] | {"prompt": f"{PROMPT} clever boy named Anton.", "max_tokens": 200}

    def text(**more: Any) -> str:
        answer = http.post("/v1/completions", json=body | {"temperature": 0} | more).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        return str(answer["choices"][0]["text"])

    included = {"include_stop_str_in_output": True}
    assert text(**included) == text()
    assert text(**included, skip_special_tokens=False) == text() + "<|eos|>"
    assert text(**included, stop=[" aunt"]) == text(stop=[" aunt"]) + " aunt"


def test_the_cause_of_an_end_is_told_as_vllm_tells_it(http: httpx2.Client, sdk: quire.Client) -> None:
    prompt = f"{PROMPT} clever boy named Anton."
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 200, "temperature": 0}
    token_id = sdk.generate(prompt, max_tokens=3, temperature=0).token_ids[2]
    for more, reason, cause in (
        ({}, "stop", None),  # an end-of-sequence token
        ({"stop": [" aunt"]}, "stop", " aunt"),
        ({"stop_token_ids": [token_id]}, "stop", token_id),
        ({"max_tokens": 2}, "length", None),
    ):
        (choice,) = http.post("/v1/completions", json=body | more).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == (reason, cause)
        chat = {"model": MODEL, "messages": CHAT, "max_tokens": 200, "temperature": 0, **more}
        (choice,) = http.post("/v1/chat/completions", json=chat).json()["choices"]
        assert "stop_reason" in choice and (choice["stop_reason"] is None or choice["finish_reason"] == "stop")


@pytest.mark.parametrize("path", PATHS)
def test_the_cause_of_an_end_comes_with_the_event_that_has_its_reason(api: openai.OpenAI, path: str) -> None:
    create: Any = api.completions.create if path == "/v1/completions" else api.chat.completions.create
    given = BODIES[path] | {"max_tokens": 40, "temperature": 0, "stop": [" "]}
    choices = [each.model_dump(exclude_unset=True)["choices"][0] for each in create(**given, stream=True)]
    assert choices[-1]["finish_reason"] == "stop" and choices[-1]["stop_reason"] == " "
    assert not [each for each in choices[:-1] if "stop_reason" in each]


def test_a_completion_may_have_a_response_format(http: httpx2.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = BODIES["/v1/completions"] | {"max_tokens": 20}
    answer = http.post("/v1/completions", json=body | {"response_format": form}).json()
    assert answer["choices"][0]["text"] == '{"a":1}'
    refused = http.post("/v1/completions", json=body | {"response_format": form, "ignore_eos": True}).json()["error"]
    assert refused["param"] == "ignore_eos"
    twice = body | {"response_format": form, "structured_outputs": {"regex": "a"}}
    assert http.post("/v1/completions", json=twice).json()["error"]["param"] == "structured_outputs"
