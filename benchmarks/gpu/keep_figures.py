"""Figures of a GPU check taken over into `benchmarks/results`: a check's machine has no repository to commit them to.

Each result file of the chosen stages is kept as the machine wrote it, but for the folders of that machine.

    python -m benchmarks.gpu.keep_figures FOLDER/gpu_check.json [--stages NAME ...] [--commit COMMIT] [--out DIR]

`--commit` is that of the files which the machine had, where its copy of the repository says another.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS

_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[\w.+-]+/)+(?=[\w.+-])")


def kept(report: Mapping[str, Any], stages: Sequence[str], commit: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the result of each of these stages, of all if none is named, with the name of its file: the stage's."""
    for stage in report["stages"]:
        if stages and stage["name"] not in stages:
            continue
        for result in stage["results"].values():
            own = {} if commit is None else {"commit": commit}
            yield f"{stage['name'].replace(' ', '_')}.json", {**without_folders(result), **own}


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
    for name, result in kept(json.loads(options.report.read_text()), options.stages, options.commit):
        (options.out / name).write_text(json.dumps(result, indent=2) + "\n")
        print(name)


if __name__ == "__main__":
    main()
