"""Files of the project are found in its repository and in a copy that has none, also where git is not installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.report import ROOT
from tests.files_page import PAGE, listed_files, page
from tests.project_files import has_repository, project_files


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A small project with builds beside its files."""
    for name in (
        "one.py",
        "part/two.py",
        ".ci/run",
        "é 雪.md",
        ".venv/lib/x.py",
        "part/__pycache__/two.pyc",
        "a.egg-info/y",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / ".gitignore").write_text(".venv\n__pycache__/\n*.egg-info/\n")
    return tmp_path


def test_a_copy_without_its_repository_has_the_same_files(copy: Path) -> None:
    expected = [".ci/run", ".gitignore", "one.py", "part/two.py", "é 雪.md"]
    assert not has_repository(copy) and project_files(copy) == expected
    if shutil.which("git") is not None:
        subprocess.run(["git", "init", "-q", str(copy)], check=True)
        assert has_repository(copy) and project_files(copy) == expected
        assert not has_repository(copy / ".ci") and project_files(copy / ".ci") == ["run"]


def test_without_git_all_files_are_found(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(copy))
    assert project_files(copy) == [".ci/run", ".gitignore", "one.py", "part/two.py", "é 雪.md"]
    assert page(listed_files()) == PAGE.read_text()
    assert {"Makefile", "demo/model/config.json", "tests/test_project_files.py"} <= set(project_files(ROOT))
