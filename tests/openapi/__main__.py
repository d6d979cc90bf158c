"""Schemathesis against real services with the demo model: every answer to generated requests is as /openapi.json says.

    python -m tests.openapi [--examples 10000] [--seed 1] [--record]
    python -m tests.openapi --document FILE  # of another server: those of its paths that we have, and faults of ours

Requests are valid and invalid ones of each operation, other methods than those it has, and chains along the links of
the document. Prints the answers of each operation, and ends with status 1 if a check fails or if there were fewer
requests than asked for. `--record` keeps the result among those of the benchmarks.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.report import RESULTS, ROOT, table, write_result
from tests.openapi.foreign_document import shared_document
from tests.openapi.outcome import Outcome
from tests.services import running_services

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
    "use_after_free",
)
# Arguments of each pass, and its part of the requests that are asked for: as examples of each operation, or as chains.
_PASSES: tuple[tuple[tuple[str, ...], int], ...] = (
    (("--phases", "coverage,fuzzing"), 40),
    (("--phases", "stateful", "--mode", "positive", "--include-path-regex", "^/v1/responses"), 120),
    (("--phases", "stateful", "--mode", "positive", "--include-path-regex", "^/requests|^/v1/completions"), 120),
    (("--phases", "stateful", "--mode", "positive", "--include-path-regex", "^/prefixes"), 200),
)
# Parts of the requests of another server's document that have types which the gateway does not know, and not.
_FOREIGN_SHARES = ((False, 1.0), (True, 0.1))
_MOST_S = 3600.0
_MODEL = "demo"
_WORKER = ("--dtype", "float32", "--threads", "1", "--num-blocks", "2000", "--model-name", _MODEL)


def main() -> None:
    """Start the services, run schemathesis, tell what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=10_000, help="requests in all, at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--document", type=Path, help="OpenAPI document of another server, such as OpenAI's, as JSON")
    parser.add_argument("--record", action="store_true", help="write the result")
    parser.add_argument("--output", type=Path, default=RESULTS / "openapi.json", help="where")
    options = parser.parse_args()
    if options.document is not None and options.record:
        parser.error("only a run over our own document is recorded")
    began_s = time.monotonic()
    with running_services(*_WORKER) as services:
        if options.document is None:
            outcome = run(services.url, options.examples, options.seed)
        else:
            document = json.loads(options.document.read_text())
            outcome = run_foreign(services.url, document, options.examples, options.seed)
        for service in (services.scheduler, services.gateway):
            outcome.failures += [line for line in service.raw if "Traceback" in line or '"level": "error"' in line]
    print(_text(outcome), flush=True)  # noqa: T201
    is_met = not outcome.failures and outcome.num_cases >= options.examples
    if options.record:
        figures = {
            "seed": options.seed,
            "asked_for": options.examples,
            "seconds": round(time.monotonic() - began_s, 1),
            **outcome.record(),
        }
        write_result(options.output, "openapi", figures)
    sys.exit(0 if is_met else 1)


def run(url: str, num_examples: int, seed: int) -> Outcome:
    """Run schemathesis against a gateway, over its own document."""
    passes = [
        ("--max-examples", str(-(-num_examples // part)), "--checks", ",".join(CHECKS), *arguments)
        for arguments, part in _PASSES
    ]
    paths = httpx2.get(f"{url}/openapi.json").json()["paths"]
    del paths["/openapi.json"]  # is read, not tried
    outcome = _outcome_of(url, f"{url}/openapi.json", passes, seed)
    outcome.require_success(paths)
    return outcome


def run_foreign(url: str, document: dict[str, Any], num_examples: int, seed: int) -> Outcome:
    """Run schemathesis against a gateway, over those paths of another server's document that the gateway has.

    Answers differ from that document where a field is not supported, so a fault of ours is all that is looked for.
    """
    ours = httpx2.get(f"{url}/openapi.json").json()
    outcome = Outcome()
    paths: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for has_other_types, share in _FOREIGN_SHARES:
            shared = shared_document(document, ours, has_other_types=has_other_types)
            paths = shared["paths"]
            file = Path(folder) / f"openapi_{share}.json"
            file.write_text(json.dumps(shared))
            num_operations = sum(map(len, paths.values()))
            most = str(math.ceil(num_examples * share / num_operations))
            checks = ("--checks", "not_a_server_error", "--url", f"{url}/v1")
            passes = [("--max-examples", most, "--phases", "fuzzing", *checks)]
            outcome.add_all(_outcome_of(url, str(file), passes, seed))
    outcome.require_success(paths)
    return outcome


def _outcome_of(url: str, document: str, passes: Sequence[Sequence[str]], seed: int) -> Outcome:
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        for number, arguments in enumerate(passes):
            events = Path(folder) / f"events_{number}.ndjson"
            ended = _schemathesis(url, document, Path(folder), events, ("--seed", str(seed), *arguments))
            if not events.exists():
                raise RuntimeError(f"schemathesis failed:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
            num_failures = len(outcome.failures)
            with events.open() as lines:
                outcome.add(lines)
            if ended.returncode != 0 and len(outcome.failures) == num_failures:
                outcome.failures.append(f"schemathesis ended with {ended.returncode}: {ended.stdout[-2000:]}")
    return outcome


def _schemathesis(
    url: str, document: str, folder: Path, events: Path, arguments: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", document),
        *("--continue-on-failure", "--no-shrink", "--warnings", "off", "--request-timeout", "60"),
        *("--report", "ndjson", "--report-ndjson-path", str(events), *arguments),
    ]
    env = {
        **os.environ,
        "SCHEMATHESIS_HOOKS": "tests.openapi.hooks",
        "PYTHONPATH": str(ROOT),
        "QUIRE_GATEWAY_URL": url,  # for the hooks
    }
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=_MOST_S, check=False)


def _text(outcome: Outcome) -> str:
    rows = [
        (label, counts.total(), ", ".join(f"{number:,} × {status}" for status, number in sorted(counts.items())))
        for label, counts in sorted(outcome.answers.items())
    ]
    shown = [f"FAULT {each}" for each in outcome.failures[:40]]
    verdict = f"{outcome.num_cases:,} requests, {len(outcome.failures) or 'no'} faults"
    return "\n".join([table(("operation", "requests", "answers"), rows), *shown, verdict])


if __name__ == "__main__":
    main()
