"""The compliance suite of Open Responses against real processes, with a model that recites an answer or a call.

    python -m tests.open_responses FOLDER [--bun bun] [--record]

FOLDER is a checkout of the suite whose dependencies are installed; bun runs it. Knows the suite's command line and none
of its templates but those whose subject this server does not offer. Ends with status 1 if another one does not pass.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, table, write_result
from tests.gateway.reciter import MODEL, serve_reciter
from tests.gateway.reciting_model import cue

# Recited where tools are offered, and where none are.
ANSWERS = {
    cue("call"): [
        "<tool_call>",
        '\n{"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}\n',
        "</tool_call>",
    ],
    cue("words"): ["Hello, my friend. This is an answer."],
}
TEMPLATE = """
{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}{% endfor %}
{%- for tool in tools or [] %}{{- 'tool <tool_call> ' + tool.function.name + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '※' + ('call' if tools else 'words') + '※' }}{% endif %}
"""
# By the beginnings of templates' ids.
NOT_OFFERED = {
    "image-input": "images are refused",
    "websocket-": "WebSockets, which the specification leaves open, are not offered",
}
_TIMEOUT_S = 300.0  # of the suite, which waits 30 s for an event


@dataclass(frozen=True, slots=True)
class TemplateRun:
    """Outcome of one template. `not_offered` is why it cannot pass, if its subject is not offered."""

    id: str
    name: str
    outcome: str  # in the suite's words: passed, failed, skipped
    errors: Sequence[str]
    not_offered: str | None

    @property
    def is_fault(self) -> bool:
        """True if it should have passed."""
        return self.outcome != "passed" and self.not_offered is None


def runs_of(report: dict[str, Any]) -> list[TemplateRun]:
    """Runs in a report of the suite, by id. Raises ValueError if it has none."""
    runs = [
        TemplateRun(each["id"], each["name"], each["status"], each.get("errors") or [], _not_offered(each["id"]))
        for each in report["results"]
    ]
    if not runs:
        raise ValueError("the suite ran no template")
    return sorted(runs, key=lambda run: run.id)


def _not_offered(template_id: str) -> str | None:
    return next((reason for begin, reason in NOT_OFFERED.items() if template_id.startswith(begin)), None)


def run_suite(suite: Path, bun: str, url: str) -> dict[str, Any]:
    """Run all templates against this URL. The suite's report."""
    command = [bun, "run", "bin/compliance-test.ts", "--base-url", f"{url}/v1", "--api-key", "none", "--model", MODEL]
    ran = subprocess.run(
        [*command, "--json"], cwd=suite, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
    try:
        report: dict[str, Any] = json.loads(ran.stdout)
    except json.JSONDecodeError:
        sys.exit(f"the suite gave no report:\n{ran.stdout}{ran.stderr}")
    return report


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _commit_of(suite: Path) -> str:
    changed = _said("git", "-C", str(suite), "status", "--porcelain", "--untracked-files=no")
    return _said("git", "-C", str(suite), "rev-parse", "HEAD") + ("-dirty" if changed else "")


def main() -> None:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path, metavar="FOLDER")
    parser.add_argument("--bun", default="bun", help="the program that runs the suite")
    parser.add_argument("--record", action="store_true", help="write the result")
    parser.add_argument("--output", type=Path, default=RESULTS / "open_responses.json", help="where")
    options = parser.parse_args()
    suite_commit, bun_version = _commit_of(options.suite), _said(options.bun, "--version")
    with tempfile.TemporaryDirectory() as folder, serve_reciter(Path(folder), ANSWERS, TEMPLATE) as (_, url):
        runs = runs_of(run_suite(options.suite, options.bun, url))
    print(table(("template", "outcome", ""), [(run.id, run.outcome, run.not_offered or "") for run in runs]))  # noqa: T201
    faults = [run for run in runs if run.is_fault]
    for run in faults:
        print(run.id, *run.errors, sep="\n    ", flush=True)  # noqa: T201
    if options.record:
        figures = {
            "command": "python -m tests.open_responses FOLDER --record",  # the folder is no part of a result
            "suite_commit": suite_commit,
            "bun": bun_version,
            "templates": [asdict(run) for run in runs],
        }
        write_result(options.output, "open_responses", figures)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
