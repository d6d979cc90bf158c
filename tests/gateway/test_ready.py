"""Readiness of a gateway: a request that came now would be served."""

import asyncio

import pytest
from structlog.testing import capture_logs

import quire
from gateway_svc.app import create_app
from quire.connection import INFERENCE_SERVICE, JOURNAL_SERVICE
from tests.gateway.raw_http import served, talk

SERVING, NOT_SERVING = quire.Health.SERVING, quire.Health.NOT_SERVING


class HealthClient(quire.AsyncClient):
    """A client whose scheduler has this health; services that are not named are not known to it."""

    def __init__(self, health: dict[str, quire.Health]) -> None:
        super().__init__("127.0.0.1:1")
        self._scripted = health

    async def health(self, service: str = INFERENCE_SERVICE) -> quire.Health:
        if service not in self._scripted:
            raise quire.NotFoundError("no such service")
        return self._scripted[service]


async def status_of(health: dict[str, quire.Health]) -> bytes:
    async with served(create_app(HealthClient(health), max_body_bytes=1 << 20)) as port:
        answer = await talk(port, b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return answer.split(b" ", 2)[1]


@pytest.mark.parametrize(
    ("health", "status"),
    [
        ({INFERENCE_SERVICE: SERVING, JOURNAL_SERVICE: SERVING}, b"200"),
        ({INFERENCE_SERVICE: SERVING, JOURNAL_SERVICE: NOT_SERVING}, b"503"),
        ({INFERENCE_SERVICE: NOT_SERVING, JOURNAL_SERVICE: SERVING}, b"503"),
        ({INFERENCE_SERVICE: SERVING}, b"200"),  # an older scheduler
        ({JOURNAL_SERVICE: SERVING}, b"503"),
    ],
)
def test_a_gateway_is_ready_while_a_worker_serves_and_the_store_takes_requests(
    health: dict[str, quire.Health], status: bytes
) -> None:
    with capture_logs() as logs:
        assert asyncio.run(status_of(health)) == status
    assert [line["event"] for line in logs] == (["not ready"] if status == b"503" else [])


def test_a_gateway_without_a_scheduler_logs_why_it_does_not_serve() -> None:
    """A wrong address shows in the log, not in the answers to its clients alone."""
    with capture_logs() as logs:
        asyncio.run(calls_without_a_scheduler())
    assert [line["event"] for line in logs] == ["not ready", "calls answered with 503"]
    assert all("no Quire server answers at 127.0.0.1:1 " in line["reason"] for line in logs)


async def calls_without_a_scheduler() -> None:
    client = quire.AsyncClient("127.0.0.1:1", connect_timeout_s=0.5)
    async with client, served(create_app(client, max_body_bytes=1 << 20)) as port:
        for path in ("/ready", "/v1/models", "/ready", "/v1/models"):
            call = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            answer = await talk(port, call.encode())
            assert answer.split(b" ", 2)[1] == b"503", answer
