"""A handful of faults against real processes, small: nothing is lost, repeated, left out, changed or leaked.

What is a matter of the machine's speed is not looked at here.
"""

import asyncio

import pytest

from tests.chaos.__main__ import QUICK_EXTENT
from tests.chaos.catalogue import QUICK
from tests.chaos.fault_table import Result
from tests.chaos.runs import run
from tests.chaos.stage import Scenario

SEED = 1
TIMEOUT_S = 600  # the first test plays all; a busy machine takes its time


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return {result.scenario.fault: result for result in asyncio.run(run(QUICK, SEED, QUICK_EXTENT))}


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("scenario", QUICK, ids=lambda scenario: scenario.fault)
def test_no_promise_is_broken(scenario: Scenario, results: dict[str, Result]) -> None:
    result = results[scenario.fault]
    assert result.figures is not None, result.error
    assert result.figures.accepted
    missed = [str(target) for target in result.missed if not target.is_speed]
    assert not missed, (missed, result.figures.reasons)
