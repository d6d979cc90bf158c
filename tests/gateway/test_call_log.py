"""The log has a line about each call that has ended, with the id of its request, and none about probes."""

import httpx2
import pytest
from structlog.testing import capture_logs

import quire
from gateway_svc.app import create_app
from tests.gateway.raw_http import served
from tests.gateway.scripted_client import Scripted, ScriptedClient, chunks_of
from tests.services import start_gateway


def http_to(client: quire.AsyncClient, *, logs_calls: bool = True) -> httpx2.AsyncClient:
    app = create_app(client, max_body_bytes=1 << 20, logs_calls=logs_calls)
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://gateway")


def scripted() -> ScriptedClient:
    return ScriptedClient(Scripted(chunks=chunks_of(["a", "b"], has_ends=True)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "header", "body"),
    [
        ("/v1/completions", "x-request-id", {"prompt": "x"}),
        ("/v1/messages", "request-id", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}),
    ],
)
async def test_a_call_that_has_ended_is_logged_with_its_request(
    path: str, header: str, body: dict[str, object], stream: bool
) -> None:
    app = create_app(scripted(), max_body_bytes=1 << 20, logs_calls=True)
    with capture_logs() as logs:
        async with served(app) as port, httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            answer = await http.post(path, json={"model": "scripted", "stream": stream, **body})
    (line,) = logs
    assert line.pop("total_ms") >= 0
    assert line == {
        "event": "call ended", "log_level": "info", "method": "POST", "path": path, "status": 200,
        "request_id": answer.headers[header], "client": "127.0.0.1",
    }  # fmt: skip


async def test_neither_a_query_nor_a_long_path_is_logged_whole() -> None:
    with capture_logs() as logs:
        async with http_to(scripted()) as http:
            await http.get("/v1/completions?key=secret")
            await http.get("/" + 5000 * "x")
    assert [each["status"] for each in logs] == [405, 404]
    assert "secret" not in str(logs)
    assert len(logs[1]["path"]) < 300


async def test_probes_and_scrapes_are_not_logged() -> None:
    with capture_logs() as logs:
        async with http_to(scripted()) as http:
            for path in ("/health", "/ping", "/metrics"):
                await http.get(path)
    assert "call ended" not in [each["event"] for each in logs]


async def test_a_gateway_that_is_told_so_logs_no_call() -> None:
    with capture_logs() as logs:
        async with http_to(scripted(), logs_calls=False) as http:
            await http.post("/v1/completions", json={"prompt": "x"})
    assert logs == []


@pytest.mark.parametrize(("options", "events"), [((), ["call ended"]), (("--no-access-log",), [])])
def test_a_gateway_logs_calls_unless_told_otherwise(options: tuple[str, ...], events: list[str]) -> None:
    """Without a scheduler: the call is one that the gateway refuses by itself."""
    gateway, url = start_gateway("127.0.0.1:1", *options)
    with gateway:
        assert httpx2.get(f"{url}/v1/unknown").status_code == 404
        assert gateway.stop() == 0
        assert [each["event"] for each in gateway.lines if each["event"] == "call ended"] == events
