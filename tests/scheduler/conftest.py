"""A site of its own for each test of a file that makes none."""

from collections.abc import AsyncIterator

import pytest

from tests.scheduler.serving_site import Site, running_site


@pytest.fixture(params=[1, 2])
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    """Site at both depths of the pipeline, of which nothing is left behind."""
    async with running_site(pipeline_depth=request.param) as made:
        yield made
        await made.idle()
