"""Faults of the gateway itself: the answer has the shape of the API, and the figures and the log have the fault."""

from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs

import quire
from common.violations import refusal_of
from gateway_svc.app import create_app
from tests.gateway.hostile_bodies import BODIES


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


class UnknowingClient(quire.AsyncClient):
    """A client of a scheduler whose model lacks a token of its tokenizer."""

    async def pin_prefix(self, *arguments: Any, **keywords: Any) -> quire.PinnedPrefix:
        raise refusal_of("prompt", "has a token that the model does not have")


@pytest.mark.parametrize(("name", "value"), [("prompt", "x"), ("messages", [{"role": "user", "content": "x"}])])
async def test_a_refused_prefix_is_named_as_it_was_given(name: str, value: Any) -> None:
    transport = httpx2.ASGITransport(create_app(UnknowingClient("127.0.0.1:1"), max_body_bytes=1 << 20))
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as http:
        answer = await http.put("/prefixes/rules", json={name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert answer.json()["error"]["message"].startswith(f"{name}: ")
