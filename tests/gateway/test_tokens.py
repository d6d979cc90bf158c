"""`/tokenize`, `/detokenize`, and the model's description."""

from importlib.metadata import version

import httpx2
import openai

import quire
from tests.gateway.conftest import MODEL


def test_a_text_and_back(http: httpx2.Client, sdk: quire.Client) -> None:
    text = "One day a small puppy found an old map."
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    expected = sdk.tokenize(text)
    assert answer["tokens"] == list(expected.token_ids)
    assert answer["token_strs"] == list(expected.tokens)
    assert (answer["count"], answer["max_model_len"]) == (len(expected.token_ids), sdk.model().max_model_len)
    back = http.post("/detokenize", json={"model": MODEL, "tokens": answer["tokens"]}).json()
    assert back == {"prompt": sdk.detokenize(expected.token_ids, keep_special_tokens=True)}


def test_special_tokens_may_be_left_out(http: httpx2.Client, sdk: quire.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "x", "add_special_tokens": False}).json()
    assert answer["tokens"] == list(sdk.tokenize("x", add_special_tokens=False).token_ids)


def test_a_conversation(http: httpx2.Client, sdk: quire.Client) -> None:
    messages = [{"role": "user", "content": "Who are you?"}]
    answer = http.post("/tokenize", json={"messages": messages}).json()
    assert answer["tokens"] == list(sdk.tokenize(messages).token_ids)


def test_a_text_and_a_conversation_at_once_are_refused(http: httpx2.Client) -> None:
    both = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    assert http.post("/tokenize", json=both).status_code == 400
    assert http.post("/tokenize", json={"model": MODEL}).status_code == 400


def test_models(api: openai.OpenAI, http: httpx2.Client) -> None:
    [model] = api.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "quire")
    assert api.models.retrieve(MODEL) == model
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 2048


def test_health_and_readiness(http: httpx2.Client) -> None:
    assert http.get("/health").status_code == 200
    assert http.get("/ready").status_code == 200
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200


def test_the_version_is_that_of_the_package(http: httpx2.Client) -> None:
    assert http.get("/version").json() == {"version": version("quire-llm")}


def test_a_conversation_may_end_behind_its_last_message(http: httpx2.Client, sdk: quire.Client) -> None:
    messages = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    answer = http.post("/tokenize", json=body).json()
    assert answer["tokens"] == list(sdk.tokenize(messages, continue_final_message=True).token_ids)
    assert sdk.detokenize(answer["tokens"]).endswith("I am")
