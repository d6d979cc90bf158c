"""Real processes under the faults of the matrix, and the verdict on every promise.

    python -m tests.chaos [--only F01,F07] [--campaign scheduler,workers,store,all] [--seconds S] [--seed N]
                          [--quick] [--take-over FILE]

Without `--only` and `--campaign` all faults are played, then all campaigns. Prints what came of each, writes all
results as JSON and as a page, and ends with status 1 if a target is missed. A run of some replaces only theirs, and a
shorter long run that meets its targets not that of a longer one.
`--take-over` plays nothing: it takes the results of another run, each with its commit and machine, in the same way.
"""

import argparse
import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, ROOT, circumstances, write_result
from tests.chaos.campaigns import CAMPAIGNS
from tests.chaos.campaigns import EXTENT as CAMPAIGN_EXTENT
from tests.chaos.catalogue import QUICK, SCENARIOS
from tests.chaos.fault_table import Result, page
from tests.chaos.runs import merged, run, taken_over
from tests.chaos.stage import Extent

CAMPAIGN_TIMEOUT_S = 1200.0  # beside the seconds of its faults
QUICK_EXTENT = Extent(num_asks=10, min_tokens=24, max_tokens=48, concurrency=6, num_clients=1, flow_tokens=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults by id, with commas")
    parser.add_argument("--campaign", default="", help="long runs, with commas: " + ", ".join(CAMPAIGNS))
    parser.add_argument("--seconds", type=float, default=120.0, help="how long something is killed in a long run")
    parser.add_argument("--quick", action="store_true", help="the few that `make test` plays, small; writes nothing")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--take-over", type=Path, metavar="FILE", help="results of another run")
    parser.add_argument("--json", type=Path, default=RESULTS / "chaos.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "fault_matrix.md")
    arguments = parser.parse_args()
    if arguments.quick:
        sys.exit(_status(asyncio.run(run(QUICK, arguments.seed, QUICK_EXTENT))))
    if arguments.take_over is not None:
        taken = [taken_over(arguments.json, arguments.take_over, each) for each in ("faults", "campaigns")]
        _write_results(arguments, *taken)
        return
    only = {each for each in arguments.only.split(",") if each}
    names = [each for each in arguments.campaign.split(",") if each]
    known = {scenario.fault for scenario in SCENARIOS}
    if unknown := [*sorted(only - known), *(name for name in names if name not in CAMPAIGNS)]:
        parser.error(f"not known: {', '.join(unknown)}; faults are {', '.join(sorted(known))}")
    everything = not only and not names
    scenarios = [scenario for scenario in SCENARIOS if everything or scenario.fault in only]
    campaigns = [CAMPAIGNS[name] for name in (CAMPAIGNS if everything else names)]
    results = asyncio.run(run(scenarios, arguments.seed, Extent())) if scenarios else []
    _write(arguments, results, [])
    if campaigns:
        extent = replace(CAMPAIGN_EXTENT, campaign_s=arguments.seconds)
        long = run(campaigns, arguments.seed, extent, scene_timeout_s=arguments.seconds + CAMPAIGN_TIMEOUT_S)
        results += (long_results := asyncio.run(long))
        _write(arguments, [], long_results)
    sys.exit(_status(results))


def _write(arguments: argparse.Namespace, results: list[Result], long_results: list[Result]) -> None:
    facts = circumstances()
    machine = facts["machine"]
    run_facts = {
        "seed": arguments.seed,
        "commit": facts["commit"],
        "load_average": machine["load_average"],
        "machine": f"{machine['cpus']} cores of {machine['cpu']}",
    }
    faults = merged(arguments.json, "faults", results, SCENARIOS, **run_facts)
    long = merged(arguments.json, "campaigns", long_results, list(CAMPAIGNS.values()), **run_facts)
    _write_results(arguments, faults, long)


def _write_results(arguments: argparse.Namespace, faults: list[dict[str, Any]], long: list[dict[str, Any]]) -> None:
    write_result(arguments.json, "chaos", {"faults": faults, "campaigns": long})
    arguments.page.parent.mkdir(parents=True, exist_ok=True)
    arguments.page.write_text(page(faults, long))


def _status(results: list[Result]) -> int:
    return 0 if all(result.is_met for result in results) else 1


if __name__ == "__main__":
    main()
