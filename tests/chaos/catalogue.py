"""Scenarios in the order of the fault matrix."""

from tests.chaos import (
    client_faults,
    clock_faults,
    cluster_faults,
    input_faults,
    move_faults,
    overload_faults,
    poison_faults,
    resharding_faults,
    scheduler_faults,
    shard_faults,
    slow_store_faults,
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
    shard_faults,
    cluster_faults,
    resharding_faults,
    move_faults,
    store_faults,
    slow_store_faults,
    wire_faults,
    client_faults,
    clock_faults,
    *(overload_faults, input_faults, supervisor_faults),
)

SCENARIOS: tuple[Scenario, ...] = tuple(
    sorted((scenario for theme in _BY_THEME for scenario in theme.SCENARIOS), key=lambda scenario: scenario.fault)
)

# Those that `make test` plays: few, and the one that leaves a worker dead comes last.
QUICK: tuple[Scenario, ...] = (
    *(scenario for scenario in SCENARIOS if scenario.fault in ("F07", "F11", "F24")),
    *(scenario for scenario in client_faults.SCENARIOS if scenario.fault == "F10"),
    wire_faults.HALF_OPEN,
    *(scenario for scenario in SCENARIOS if scenario.fault == "F01"),
)
