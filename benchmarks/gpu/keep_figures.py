"""Outcomes and figures of a GPU check taken over into `benchmarks/results`: its machine has nowhere to commit them.

Each result file of the chosen stages is kept as the machine wrote it, but for the folders of that machine; of a whole
check the outcome of each stage, too.

    python -m benchmarks.gpu.keep_figures FOLDER/gpu_check.json [--stages NAME ...] [--commit COMMIT] [--out DIR]

`--commit` is that of the files which the machine had, where its copy of the repository says another.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.page_section import Document, Headline, PageSection, Section, Target, grid
from benchmarks.report import RESULTS

KIND = "gpu_check"
_SAID = (
    "began",
    "is_complete",
    "is_correct",
    "left_out",
    "command",
    "commit",
    "grpc_experiments",
    "versions",
    "machine",
)
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[\w.+-]+/)+(?=[\w.+-])")


def kept(report: Mapping[str, Any], stages: Sequence[str], commit: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the result of each of these stages, of all if none is named, with the name of its file: the stage's."""
    for stage in report["stages"]:
        if stages and stage["name"] not in stages:
            continue
        for result in stage["results"].values():
            yield f"{stage['name'].replace(' ', '_')}.json", _as_kept(result, commit)


def outcomes(report: Mapping[str, Any], commit: str | None) -> dict[str, Any]:
    """Outcome of each stage, as a result."""
    stages = [{key: stage[key] for key in ("name", "status", "seconds", "key_figures")} for stage in report["stages"]]
    return {"benchmark": KIND, **_as_kept({key: report[key] for key in _SAID}, commit), "stages": stages}


def _as_kept(document: Mapping[str, Any], commit: str | None) -> dict[str, Any]:
    return {**without_folders(dict(document)), **({} if commit is None else {"commit": commit})}


def without_folders(value: Any) -> Any:
    """The same with only the last part of each absolute path."""
    if isinstance(value, str):
        return _FOLDERS.sub("", value)
    if isinstance(value, dict):
        return {key: without_folders(each) for key, each in value.items()}
    return [without_folders(each) for each in value] if isinstance(value, list) else value


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="gpu_check.json of the check's folder")
    parser.add_argument("--stages", nargs="*", default=[], help="default: all that have results")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    report = json.loads(options.report.read_text())
    results = dict(kept(report, options.stages, options.commit))
    if not options.stages:
        results[f"{KIND}.json"] = outcomes(report, options.commit)
    for name, result in results.items():
        (options.out / name).write_text(json.dumps(result, indent=2) + "\n")
        print(name)


def section_of(document: Document) -> Section:
    """Section of the results page."""
    stages = document["stages"]
    tests = [stage for stage in stages if "passed" in stage["key_figures"] or "failed" in stage["key_figures"]]
    counts = {word: sum(stage["key_figures"].get(word, 0) for stage in tests) for word in ("passed", "failed", "error")}
    late = [stage["name"] for stage in stages if stage["status"] == "timed out"]
    skipped = [stage["name"] for stage in stages if stage["status"] == "skipped"]
    return Section(
        done="All stages that a machine with one GPU has, in one call of ten minutes; kernels are compiled in it.",
        headlines=[
            Headline(
                f"{counts['passed']} tests passed, {counts['failed'] + counts['error']} failed",
                [Target("no stage of tests fails or is out of time", document["is_correct"])],
            ),
            Headline(f"out of time: {', '.join(late) or 'none'}"),
            Headline(
                f"not begun: {', '.join(skipped) or 'none'}",
                [Target("every stage runs to its end", document["is_complete"])],
            ),
        ],
        blocks=[
            grid(
                ("stage", "outcome", "seconds", "tests passed"),
                [
                    (stage["name"], stage["status"], stage["seconds"], stage["key_figures"].get("passed"))
                    for stage in stages
                ],
            )
        ],
        versions=("torch", "triton", "transformers"),
    )


SECTION = PageSection(
    kinds=(KIND,),
    title="GPU check",
    question="Do kernels, models and services pass their tests on a GPU?",
    command="make gpu-check OUT=DIR",
    measures=("kernels", "worker_svc"),
    target="every test passes, and every stage runs to its end",
    render=section_of,
)


if __name__ == "__main__":
    main()
