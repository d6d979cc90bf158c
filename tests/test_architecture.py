"""ARCHITECTURE.md lists every file where it lies, and no other."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")


def test_every_file_is_listed_and_every_listed_file_is_there() -> None:
    files = (ROOT / "ARCHITECTURE.md").read_text().split("## File by file", 1)[1]
    sections = dict(re.findall(r"### `([^`]+)`(.*?)(?=\n### |\Z)", files, re.DOTALL))
    listed = {
        name: set(re.findall(r"(?m)^\| `([^`]+)` \|", rows)) for name, rows in sections.items() if name != "tests"
    }
    there = {
        name: {
            path.name
            for path in (ROOT / name).iterdir()
            if path.suffix in (".py", ".proto") and path.name != "__init__.py" and not GENERATED.search(path.name)
        }
        for name in listed
    }
    assert listed == there
