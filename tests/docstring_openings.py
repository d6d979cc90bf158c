"""Entry point of `python -m tests.docstring_openings [FOLDER ...]`: docstrings open with a noun or a verb.

A reader who skims first words learns nothing from "It", "Those that" or "Whether all": this finds them. `make check`
runs it over the whole tree. Knows nothing of what a docstring says after its first word.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SERVICES = ("scheduler_svc", "worker_svc", "gateway_svc")
FOLDERS = ("common", "kernels", "quire", *SERVICES, "benchmarks", "demo", "tests", "hatch_build.py")
GENERATED = ROOT / "quire" / "v1"
# Pronouns, relatives and conjunctions. Determiners in front of a noun ("Each worker", "No block") are welcome.
_UNTELLING = """
    it its they them their theirs this that these those he him his she her we us our ours ones all
    of any nobody somebody anybody everybody nothing something anything everything who whom whose
    what whatever which whichever whether where wherever when whenever while why how however as if
    so
"""
UNTELLING = frozenset(_UNTELLING.split())
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def untelling_openings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and first line of each docstring of a Python file that opens with one of `UNTELLING`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            first = re.match(r"[A-Za-z]+", text)
            if first and first.group().lower() in UNTELLING:
                yield node.body[0].lineno, text.splitlines()[0]


def main(arguments: list[str]) -> int:
    """Exit code 1 if a docstring below the folders, or of the files, opens with a word that tells nothing."""
    num_found = 0
    for folder in [ROOT / each for each in arguments or FOLDERS]:
        for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
            if path.is_relative_to(GENERATED):
                continue
            for line, text in untelling_openings(path):
                num_found += 1
                sys.stdout.write(f"{path.relative_to(ROOT)}:{line}: docstring opens with no noun or verb: {text}\n")
    return 1 if num_found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
