"""Real processes under the faults of the matrix, and whether every promise held.

    python -m tests.chaos [--only F01,F07] [--seed N] [--json FILE] [--table FILE]

Prints one line for each scenario, writes all results as JSON and as a table, and ends with status 1 if a target is
missed. A run of some scenarios only replaces those in the files.
"""

import argparse
import asyncio
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, ROOT, write_result
from tests.chaos.catalogue import SCENARIOS
from tests.chaos.fault_table import Result, table
from tests.chaos.stage import Extent, Scenario, Stage

SCENE_TIMEOUT_S = 400.0


async def play(stage: Stage, scenario: Scenario) -> Result:
    """Never raises for what a scenario does wrong."""
    began_s = time.monotonic()
    figures, error = None, ""
    try:
        async with asyncio.timeout(SCENE_TIMEOUT_S):
            figures = await scenario.play(stage)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
        traceback.print_exc()
    result = Result(scenario, figures, error, time.monotonic() - began_s)
    await stage.end_scene(failed=not result.is_met)
    return result


async def run(scenarios: list[Scenario], seed: int) -> list[Result]:
    stage = Stage(seed, Extent())
    results = []
    try:
        for scenario in scenarios:
            result = await play(stage, scenario)
            say(result)
            results.append(result)
    finally:
        await stage.close()
    return results


def say(result: Result) -> None:
    outcome = "met" if result.is_met else "MISSED " + ", ".join(map(str, result.missed))
    print(f"{result.scenario.fault} {result.scenario.title}: {outcome} ({result.seconds:.0f} s)")  # noqa: T201
    if result.figures is not None:
        print("   ", json.dumps(result.figures.as_json()), flush=True)  # noqa: T201


def merged(json_path: Path, results: list[Result]) -> list[dict[str, Any]]:
    """The new results beside those of other scenarios that the file has from before, in order."""
    before = json.loads(json_path.read_text())["faults"] if json_path.exists() else []
    new = {result.scenario.title: result.as_json() for result in results}
    known = {scenario.title for scenario in SCENARIOS}
    kept = [each for each in before if each["title"] not in new and each["title"] in known]
    return sorted([*kept, *new.values()], key=lambda each: (each["fault"], each["title"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults by id, with commas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS / "chaos.json")
    parser.add_argument("--table", type=Path, default=ROOT / "docs" / "fault_matrix.md")
    arguments = parser.parse_args()
    only = {each for each in arguments.only.split(",") if each}
    scenarios = [scenario for scenario in SCENARIOS if not only or scenario.fault in only]
    results = asyncio.run(run(scenarios, arguments.seed))
    faults = merged(arguments.json, results)
    write_result(arguments.json, "chaos", {"seed": arguments.seed, "faults": faults})
    arguments.table.parent.mkdir(parents=True, exist_ok=True)
    arguments.table.write_text(table(faults) + "\n")
    sys.exit(0 if all(result.is_met for result in results) else 1)


if __name__ == "__main__":
    main()
