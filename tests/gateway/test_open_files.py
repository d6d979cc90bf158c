"""Gateways with a low limit of open files answer everybody, and gRPC finds the files that its first call needs."""

import http.client
import resource
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.services import start_gateway

NUM_FILES = 256


@pytest.fixture
def few_files() -> Iterator[None]:
    """A soft limit for what is started meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def gateway(few_files: None) -> Iterator[tuple[str, int]]:
    """Host and port of a gateway without a scheduler."""
    most = ("--max-http-connections", str(2 * NUM_FILES), "--scheduler-timeout-s", "0.1")
    service, url = start_gateway("127.0.0.1:1", *most)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # for our ends of the connections
    host, port = url.removeprefix("http://").split(":")
    yield host, int(port)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert service.process.poll() is None
    service.kill()


def test_a_gateway_answers_as_many_connections_as_it_may_have(gateway: tuple[str, int]) -> None:
    with ExitStack() as opened:
        for _ in range(2 * NUM_FILES - 1):
            connection = http.client.HTTPConnection(*gateway, timeout=60)
            opened.callback(connection.close)
            assert answer(connection, "/health") == 200
        last = http.client.HTTPConnection(*gateway, timeout=60)
        opened.callback(last.close)
        assert answer(last, "/v1/models") == 503  # no scheduler: gRPC is called for the first time


def answer(connection: http.client.HTTPConnection, path: str) -> int:
    """Status of an answer; the connection stays open."""
    connection.request("GET", path)
    got = connection.getresponse()
    got.read()
    return got.status
