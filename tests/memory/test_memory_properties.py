"""Random calls in random order. MEMORY_TEST_EXAMPLES=20000 looks longer than the suite has time for."""

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.memory.memory_machine import MemoryMachine

# Which examples there are depends on the modules that other tests have imported; with 100, pins in use were once none.
MAX_EXAMPLES = int(os.environ.get("MEMORY_TEST_EXAMPLES", "200"))

EVENTS = (
    "forked samples",
    "forked beams",
    "dropped beams",
    "candidates",
    "copied blocks",
    "blocks shared between groups",
    "groups swapped out",
    "shared host blocks",
    "blocks swapped in",
    "groups to recompute",
    "evicted blocks",
    "deferred blocks",
    "pinned blocks",
    "pinned blocks in use",
    "refused pins",
    "expired groups",
    "failed steps",
)


@pytest.mark.long
def test_whatever_is_called_every_reference_has_its_holder_and_every_block_one_writer() -> None:
    run_state_machine_as_test(
        MemoryMachine,
        settings=settings(
            max_examples=MAX_EXAMPLES,
            stateful_step_count=50,
            phases=[Phase.generate],  # add Phase.shrink to look at a failure: it takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )
    # Not one of these is left out: a run that never swaps proves nothing about swapping.
    for event in EVENTS:
        assert MemoryMachine.seen[event] >= 3, f"{event}: {MemoryMachine.seen[event]}"
