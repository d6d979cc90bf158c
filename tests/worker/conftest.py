"""Fixtures that tests of both runners share."""

import pytest

from tests.worker.runners import MAKE_RUNNERS, MakeRunner


@pytest.fixture(params=MAKE_RUNNERS)
def make_runner(request: pytest.FixtureRequest) -> MakeRunner:
    return MAKE_RUNNERS[request.param]
