"""Faults of the gateway itself: the answer has the shape of the API, and the figures and the log have the fault."""

from collections.abc import Sequence
from typing import Any

import anthropic
import httpx2
import openai
import orjson
import pytest
from structlog.testing import capture_logs

import quire
from common.violations import refusal_of
from gateway_svc.api_error import from_quire
from gateway_svc.app import create_app
from gateway_svc.resumption import not_resumable
from gateway_svc.vocabulary import Vocabulary
from quire.errors import from_status, to_status
from quire.server_errors import lost_request_error
from tests.gateway.described import DOCUMENT
from tests.gateway.hostile_bodies import BODIES
from tests.gateway.scripted_client import Scripted, ScriptedClient, chunks_of
from tests.gateway.wire import WiredCall, unframed


class BrokenClient(quire.AsyncClient):
    """A client with a fault that no server causes."""

    async def model(self) -> quire.Model:
        raise RuntimeError("a fault")

    async def stats(self) -> quire.Stats:
        raise quire.UnavailableError("none")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_fault_is_answered_in_the_shape_of_the_api(path: str) -> None:
    app = create_app(BrokenClient("127.0.0.1:1"), max_body_bytes=1 << 20)
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as http:
        with capture_logs() as logs:
            answer = await http.post(path, json=BODIES["POST", path])
        figures = (await http.get("/metrics")).text
    kind = "api_error" if path == "/v1/messages" else "server_error"
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, kind)
    assert "a fault" not in answer.text
    assert [each["event"] for each in logs] == ["call failed"]
    assert f'handler="{path}",method="POST",process=' in figures
    assert 'status="5xx"' in figures


class UnknowingClient(ScriptedClient):
    """A client of a scheduler whose model lacks a token of its tokenizer."""

    async def pin_prefix(self, *arguments: Any, **keywords: Any) -> quire.PinnedPrefix:
        raise refusal_of("prompt", "has a token that the model does not have")


@pytest.mark.parametrize(("name", "value"), [("prompt", "x"), ("messages", [{"role": "user", "content": "x"}])])
async def test_a_refused_prefix_is_named_as_it_was_given(name: str, value: Any) -> None:
    transport = httpx2.ASGITransport(create_app(UnknowingClient(Scripted(chunks=[])), max_body_bytes=1 << 20))
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as http:
        answer = await http.put("/prefixes/rules", json={name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert answer.json()["error"]["message"].startswith(f"{name}: ")


class SpeechlessClient(ScriptedClient):
    """A client whose scheduler is gone when the texts of likely tokens are asked for."""

    async def token_pieces(self, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        raise quire.UnavailableError("no server answers")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "logprobs": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True}),
        ("/v1/responses", {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    ],
)
async def test_events_whose_tokens_cannot_be_looked_up_end_with_an_error(path: str, body: dict[str, Any]) -> None:
    client = SpeechlessClient(Scripted(chunks=chunks_of(["a", "b"], num_top=2, has_ends=True)))
    call = WiredCall(path=path, body=orjson.dumps({**body, "stream": True}))
    await call.answer(create_app(client, max_body_bytes=1 << 20))
    *_, last, done, rest = unframed(call.wire.body).split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    told = orjson.loads(last[last.index(b"data: ") :].removeprefix(b"data: "))["error"]
    assert "no server answers" in told["message"]


class BoundedClient(ScriptedClient):
    """A client whose scheduler takes as many tokens at once as a real one."""

    async def token_pieces(self, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        if len(token_ids) > 65_536:
            raise quire.InvalidRequestError(f"token_ids: has {len(token_ids)} ids: give at most 65536")
        return tuple(str(each).encode() for each in token_ids)


async def test_more_tokens_are_looked_up_than_the_scheduler_takes_at_once() -> None:
    vocabulary = Vocabulary(BoundedClient(Scripted(chunks=[])))
    await vocabulary.load(range(150_000))
    assert [vocabulary.text(each) for each in (0, 70_000, 149_999)] == ["0", "70000", "149999"]


class CountingTransport(httpx2.ASGITransport):
    """The application, with the calls that it gets."""

    num_calls = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.num_calls += 1
        return await super().handle_async_request(request)


@pytest.mark.parametrize("is_anthropics", [False, True])
@pytest.mark.parametrize(
    ("error", "num_calls"),
    [
        (quire.RequestFailedError("its worker died three times"), 1),
        (lost_request_error("r", 0), 3),
        (from_status(to_status(quire.RequestFailedError("it failed at the scheduler"))), 1),
        (from_status(to_status(quire.QuireError("a fault of the scheduler"))), 3),
        (quire.RequestExpiredError("its deadline has passed"), 1),
        (quire.OverloadedError("too much is waiting"), 3),
        (quire.UnavailableError("no server answers"), 3),
    ],
)
async def test_clients_do_not_repeat_a_request_whose_end_is_final(
    error: quire.QuireError, num_calls: int, is_anthropics: bool
) -> None:
    app = create_app(ScriptedClient(Scripted(chunks=[], error=error)), max_body_bytes=1 << 20)
    transport = CountingTransport(app)
    turns: list[Any] = [{"role": "user", "content": "x"}]
    http = httpx2.AsyncClient(transport=transport)
    caught: pytest.ExceptionInfo[Any]
    if is_anthropics:
        async with anthropic.AsyncAnthropic(base_url="http://gateway", api_key="none", http_client=http) as claude:
            with pytest.raises(anthropic.APIStatusError) as caught:
                await claude.messages.create(model="scripted", messages=turns, max_tokens=5)
        path = "/v1/messages"
    else:
        async with openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="none", http_client=http) as api:
            with pytest.raises(openai.APIStatusError) as caught:
                await api.chat.completions.create(model="scripted", messages=turns)
        path = "/v1/chat/completions"
    assert transport.num_calls == num_calls
    assert caught.value.response.headers.get("x-should-retry") == ("false" if num_calls == 1 else None)
    described = DOCUMENT["paths"][path]["post"]["responses"][f"{caught.value.status_code}"]
    assert ("x-should-retry" in described["headers"]) is (caught.value.status_code in (500, 504))


def test_a_key_that_is_taken_and_a_stream_that_cannot_go_on_are_final() -> None:
    assert from_quire(quire.AlreadyExistsError("another request has this key"), {}).is_final
    assert not_resumable().headers == {"x-should-retry": "false"}
    for error in (quire.InvalidRequestError("x"), quire.QuireError("x"), quire.UnavailableError("x")):
        assert not from_quire(error, {}).is_final
