"""Play scenarios one after another, print the result of each, and keep results beside those of earlier runs."""

import asyncio
import json
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.fault_table import Result
from tests.chaos.stage import Extent, Scenario, Stage
from tests.patience import patient

SCENE_TIMEOUT_S = 400.0


async def play(stage: Stage, scenario: Scenario, timeout_s: float) -> Result:
    """Play a scenario. Its failures are recorded, never raised."""
    began_s = time.monotonic()
    figures, error = None, ""
    try:
        async with asyncio.timeout(patient(timeout_s)):
            figures = await scenario.play(stage)
        await asyncio.to_thread(stage.note_ends, figures)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
        traceback.print_exc()
    result = Result(scenario, figures, error, time.monotonic() - began_s)
    await stage.end_scene(failed=not result.is_met)
    return result


async def run(
    scenarios: Sequence[Scenario], seed: int, extent: Extent, *, scene_timeout_s: float = SCENE_TIMEOUT_S
) -> list[Result]:
    """Run all scenarios with the same asks."""
    stage = Stage(seed, extent)
    results = []
    try:
        for scenario in scenarios:
            result = await play(stage, scenario, scene_timeout_s)
            say(result)
            results.append(result)
    finally:
        await stage.close()
    return results


def say(result: Result) -> None:
    """Print a line for people, and the figures."""
    outcome = "met" if result.is_met else "MISSED " + ", ".join(map(str, result.missed))
    print(f"{result.scenario.fault} {result.scenario.title}: {outcome} ({result.seconds:.0f} s)")  # noqa: T201
    if result.figures is not None:
        print("   ", json.dumps(result.figures.as_json()), flush=True)  # noqa: T201


def merged(
    file: Path, section: str, results: Sequence[Result], known: Sequence[Scenario], **run_facts: Any
) -> list[dict[str, Any]]:
    """Merge the new results, each with the facts of its run, with the file's results, in order.

    Of two results of a scenario, the one that `_is_better_kept` says is kept.
    """
    before = json.loads(file.read_text()).get(section, []) if file.exists() else []
    there = {(scenario.fault, scenario.title) for scenario in known}
    kept = {_key(each): each for each in before if _key(each) in there}
    for result in results:
        _put(kept, {**result.as_json(), **run_facts})
    return sorted(kept.values(), key=_key)


def taken_over(file: Path, other: Path, section: str) -> list[dict[str, Any]]:
    """Take over the results of another run, but none of a long run that lasted shorter than the one that is here."""
    rows = {_key(each): each for each in json.loads(file.read_text())[section]}
    for each in json.loads(other.read_text())[section]:
        _put(rows, each)
    return sorted(rows.values(), key=_key)


def _put(rows: dict[tuple[str, str], dict[str, Any]], new: dict[str, Any]) -> None:
    """Put a result in the place of its scenario's earlier one, unless that says more."""
    known = rows.get(_key(new))
    if known is None or not _is_better_kept(known, new):
        rows[_key(new)] = new


def _is_better_kept(known: dict[str, Any], new: dict[str, Any]) -> bool:
    """True if the new result is of a shorter long run. A miss is never passed over, however soon it was found."""
    return bool(new["met"]) and _seconds(new) < _seconds(known)


def _key(row: dict[str, Any]) -> tuple[str, str]:
    return row["fault"], row["title"]


def _seconds(row: dict[str, Any]) -> float:
    """Length of a long run; 0 of others, and of one that broke off."""
    return float(row.get("more", {}).get("seconds", 0.0))
