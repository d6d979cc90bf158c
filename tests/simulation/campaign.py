"""Many seeds, on all cores: one process per core, since a run has its process's clocks to itself."""

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import Any

from tests.simulation.run import Outcome, run_seed

SEEDS_AT_ONCE = 5  # that a process takes


@dataclass(slots=True)
class Tally:
    """Tally of the outcomes so far."""

    num_seeds: int = 0
    failed: list[Outcome] = field(default_factory=list)
    num_events: int = 0
    num_finished: int = 0
    num_entries: int = 0
    num_lives: int = 0
    virtual_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    effects: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        self.num_seeds += 1
        if outcome.violations:
            self.failed.append(outcome)
        self.num_events += outcome.num_events
        self.num_finished += outcome.num_finished
        self.num_entries += outcome.num_entries
        self.num_lives += outcome.num_lives
        self.virtual_s += outcome.virtual_s
        self.faults.update(outcome.faults)
        self.effects.update(outcome.effects)

    def figures(self) -> dict[str, Any]:
        """Figures to print and to record."""
        return {
            "seeds": self.num_seeds,
            "failed_seeds": sorted(outcome.seed for outcome in self.failed),
            "events": self.num_events,
            "requests_seen_to_their_end": self.num_finished,
            "journal_entries": self.num_entries,
            "scheduler_lives": self.num_lives,
            "virtual_hours": round(self.virtual_s / 3600, 2),
            "faults": dict(sorted(self.faults.items())),
            "effects": dict(sorted(self.effects.items())),
        }


def outcomes(seeds: Sequence[int], num_processes: int, *, forgets: float = 0.0) -> Iterator[Outcome]:
    """Yield outcomes in the order of the seeds."""
    context = get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context, initializer=end_with_parent) as pool:
        yield from pool.map(partial(run_seed, forgets=forgets), seeds, chunksize=SEEDS_AT_ONCE)


def end_with_parent() -> None:
    """End this process once its parent has ended, however that came; else it would run its seeds to no end."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def told(outcome: Outcome) -> str:
    """A failed seed, and how to see it fail again."""
    lines = [f"seed {outcome.seed} ({', '.join(outcome.faults) or 'no faults'})"]
    lines += [f"  {violation[:1000]}" for violation in outcome.violations]
    lines.append(f"  again: python -m tests.simulation --seed {outcome.seed} --trace")
    return "\n".join(lines)
