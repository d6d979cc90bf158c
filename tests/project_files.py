"""Files of the project: those that git tracks or would track; without its repository, those that lie there.

A copy without one is what a source distribution and an archive of a commit unpack to, and `make test` asks for no git.
"""

import os
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path


def project_files(root: Path) -> list[str]:
    """Paths of the files relative to `root`, sorted."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if has_repository(root):
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
        names = {name for name in listed if name}  # a conflict names one three times
    else:
        names = set(_walked(root))
    return sorted(name for name in names if (root / name).is_file())


def has_repository(root: Path) -> bool:
    """True if git is there and knows the folder as the top of a repository, not as a part of another one."""
    if shutil.which("git") is None:
        return False
    asked = subprocess.run(
        ["git", "rev-parse", "--show-toplevel"], cwd=root, capture_output=True, text=True, check=False
    )
    return asked.returncode == 0 and Path(asked.stdout.removesuffix("\n")).resolve() == root.resolve()


def _walked(root: Path) -> list[str]:
    """Files below the root but for what its `.gitignore` names; that has no patterns of whole paths."""
    rules = root / ".gitignore"
    ignored = [".git", *(rules.read_text().split() if rules.is_file() else ())]
    patterns = [each.removesuffix("/") for each in ignored]

    def kept(names: list[str]) -> list[str]:
        return [name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)]

    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = kept(folders)
        found += [str((Path(folder) / name).relative_to(root)) for name in kept(files)]
    return found
