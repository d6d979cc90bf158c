"""All scenarios, in the order of the fault matrix."""

from tests.chaos import (
    client_faults,
    input_faults,
    overload_faults,
    poison_faults,
    scheduler_faults,
    store_faults,
    supervisor_faults,
    wire_faults,
    worker_faults,
)
from tests.chaos.stage import Scenario

_BY_THEME = (
    worker_faults,
    poison_faults,
    scheduler_faults,
    store_faults,
    wire_faults,
    client_faults,
    *(overload_faults, input_faults, supervisor_faults),
)

SCENARIOS: tuple[Scenario, ...] = tuple(
    sorted((scenario for theme in _BY_THEME for scenario in theme.SCENARIOS), key=lambda scenario: scenario.fault)
)
