"""A deployment with a gateway, shared by the tests of this folder, and clients of it.

A file whose tests ask another deployment has a fixture `deployment` of its own; the clients are then of that.
"""

from collections.abc import Iterator

import anthropic
import httpx2
import openai
import pytest

import quire
from tests.gateway.reciter import serve_reciter
from tests.patience import patient
from tests.services import running_services

MODEL = "demo"


@pytest.fixture(scope="session")
def deployment() -> Iterator[tuple[str, str]]:
    """Addresses of the scheduler and of the gateway."""
    options = ("--dtype", "float32", "--threads", "1", "--num-blocks", "300", "--model-name", MODEL)
    with running_services(*options) as services:
        yield services.address, services.url


@pytest.fixture(scope="session")
def reciter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Addresses of the scheduler and of the gateway of a model that recites answers."""
    with serve_reciter(tmp_path_factory.mktemp("reciter")) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def url(deployment: tuple[str, str]) -> str:
    return deployment[1]


@pytest.fixture(scope="module")
def api(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url, timeout=patient(60)) as client:
        yield client


@pytest.fixture(scope="module")
def sdk(deployment: tuple[str, str]) -> Iterator[quire.Client]:
    with quire.Client(deployment[0]) as client:
        yield client
