"""All scenarios, in the order of the fault matrix."""

from tests.chaos import scheduler_faults, store_faults, worker_faults
from tests.chaos.stage import Scenario

SCENARIOS: tuple[Scenario, ...] = tuple(
    sorted(
        (*worker_faults.SCENARIOS, *scheduler_faults.SCENARIOS, *store_faults.SCENARIOS),
        key=lambda scenario: scenario.fault,
    )
)
