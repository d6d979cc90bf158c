"""Pages about the code name what is there: `docs/files.md` is generated, others name files that exist."""

import re
import subprocess

import pytest

from tests.files_page import PAGE, ROOT, listed_files, page

PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in ("durability", "extending", "memory")))
NAMED_FILE = re.compile(r"`([\w./]+\.(?:py|proto|cpp|h|toml|yaml))`")


def test_the_page_of_files_is_what_their_first_sentences_make() -> None:
    assert PAGE.read_text() == page(listed_files()), "run `make files-page`"


@pytest.mark.parametrize("name", [*PAGES, "docs/wire.md", "docs/worker.md"])
def test_files_that_a_page_names_exist(name: str) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    ends = {"/" + path for path in tracked}
    named = set(NAMED_FILE.findall((ROOT / name).read_text()))
    assert named
    missing = [each for each in named if not any(path.endswith("/" + each) for path in ends)]
    assert not missing, f"{name} names files that are not there: {missing}"
