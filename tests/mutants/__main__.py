"""`make mutants`: draws faults with a seed, tries each against the related tests, writes docs/mutants.{json,md}."""

import argparse
import json
import math
import os
import queue
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path

from tests.mutants.operators import Mutant, is_python, mutants_of
from tests.mutants.report import Equivalent, page, read_equivalents, summary
from tests.mutants.running import Outcome, Sandbox
from tests.mutants.targets import TARGETS, Target
from tests.patience import patient

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENTS = ROOT / "tests/mutants/equivalents.json"
LIMIT_S = 1200.0  # on an idle machine


def drawn(possible: list[tuple[Target, Mutant]], seed: int, number: int) -> list[tuple[Target, Mutant]]:
    """A sample in random order: what is tried of it in a bounded time is a sample, too."""
    return random.Random(seed).sample(possible, min(number, len(possible)))


def tryable(chosen: list[tuple[Target, Mutant]], root: Path) -> list[tuple[Target, Mutant]]:
    """Keep the mutants whose file still compiles."""
    return [each for each in chosen if is_python(each[1], (root / each[1].path).read_text())]


def possible_mutants(root: Path) -> list[tuple[Target, Mutant]]:
    """List every possible mutant."""
    return [
        (target, mutant)
        for target in TARGETS
        for path in target.source_paths(root)
        for mutant in mutants_of(path, (root / path).read_text())
    ]


def reason_for(outcome: Outcome, equivalents: list[Equivalent], root: Path) -> str:
    """Look up why a survivor is equivalent; empty if nobody has argued so."""
    mutant = outcome.mutant
    line = (root / mutant.path).read_text().splitlines()[mutant.line - 1]
    for each in equivalents:
        is_it = (each.path, each.before, each.after) == (mutant.path, mutant.before, mutant.after)
        if outcome.status == "survived" and is_it and each.context in line:
            return each.reason
    return ""


class Campaign:
    """Tries mutants side by side, each in one of several copies of the project."""

    def __init__(self, root: Path, folder: Path, num_jobs: int) -> None:
        self._root = root
        self._free: queue.SimpleQueue[Sandbox] = queue.SimpleQueue()
        for number in range(num_jobs):
            self._free.put(Sandbox(root, folder / str(number)))
        self._pool = ThreadPoolExecutor(num_jobs)

    def outcomes(self, chosen: list[tuple[Target, Mutant]], limit_s: float, end_s: float) -> list[Outcome | None]:
        """Try mutants; outcomes in the order of `chosen`, None if not begun at `end_s`. `limit_s`: time for one."""
        futures = [self._pool.submit(self._tried, *each, limit_s, end_s) for each in chosen]
        for number, done in enumerate(as_completed(futures), start=1):
            if (outcome := done.result()) is not None:
                say(f"{number}/{len(chosen)} {described(outcome)}")
        return [future.result() for future in futures]

    def _tried(self, target: Target, mutant: Mutant, limit_s: float, end_s: float) -> Outcome | None:
        if time.monotonic() > end_s:
            return None
        sandbox = self._free.get()
        try:
            tests, num_near = target.test_paths(self._root, mutant.path)
            return sandbox.try_mutant(mutant, tests, limit_s, num_near)
        finally:
            self._free.put(sandbox)


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 1 if a fault survived that is not argued to be equivalent."""
    possible = possible_mutants(ROOT)
    chosen = tryable(drawn(possible, arguments.seed, arguments.num), ROOT)
    chosen = [each for each in chosen if arguments.only in each[1].path]
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)  # now: nothing is lost at the end
    with tempfile.TemporaryDirectory(prefix="quire-mutants-") as folder:
        campaign = Campaign(ROOT, Path(folder), arguments.jobs)
        end_s = time.monotonic() + 60 * arguments.minutes
        tried = zip(chosen, campaign.outcomes(chosen, patient(arguments.limit_s), end_s), strict=True)
        done = sorted(
            ((target.name, outcome) for (target, _), outcome in tried if outcome is not None),
            key=lambda each: (each[1].mutant.path, each[1].mutant.start),
        )
    outcomes = [outcome for _, outcome in done]
    equivalents = read_equivalents(EQUIVALENTS)
    reasons = [reason_for(each, equivalents, ROOT) for each in outcomes]
    facts = {
        "seed": arguments.seed,
        "num_possible": len(possible),
        "date": datetime.now(UTC).date().isoformat(),
        "num_cpus": os.cpu_count(),
    }
    result = summary(outcomes, [name for name, _ in done], reasons, facts)
    (out / "mutants.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    (out / "mutants.md").write_text(page(result))
    say(json.dumps(result["score"]))
    return int(
        any(each.status in ("survived", "unconfirmed") and not why for each, why in zip(outcomes, reasons, strict=True))
    )


def say(line: str) -> None:
    """A line of progress."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def described(outcome: Outcome) -> str:
    """One line about a mutant."""
    mutant = outcome.mutant
    before, after = (" ".join(text.split())[:70] for text in (mutant.before, mutant.after))
    place = f"{mutant.path}:{mutant.line}"
    by = f" by {outcome.found_by}" if outcome.found_by else ""
    return f"{place} {mutant.operator}: {before!r} -> {after!r}: {outcome.status}{by}, {outcome.seconds} s"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="which faults are drawn")
    parser.add_argument("--num", type=int, default=400, help="how many")
    parser.add_argument("--jobs", type=int, default=1, help="how many are tried side by side")
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, help="seconds for the tests of one, on an idle machine"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin none after so many")
    parser.add_argument("--only", default="", help="of those drawn only such with this in their path")
    parser.add_argument("--out", default=str(ROOT / "docs"), help="folder of mutants.json and mutants.md")
    sys.exit(run(parser.parse_args()))


if __name__ == "__main__":
    main()
