"""Native kernels are compiled once, and say why they are not there."""

import os
import pwd
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels.native.build import cache_directory, library_path, needs_build
from kernels.native.compiling import NativeUnavailableError
from kernels.native.native_kernels import NativeKernels, choose_kernels, native_kernels
from kernels.native.torch_kernels import TorchKernels


def _environment(directory: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "QUIRE_CACHE_DIR": str(directory), **more}


def _compiler_script(folder: Path, body: str) -> str:
    script = folder / "compiler"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def full_cache(native: NativeKernels, tmp_path: Path) -> Path:
    """A cache folder that has the build of this machine, and nothing else."""
    cache = tmp_path / "full"
    cache.mkdir()
    shutil.copy(library_path(os.environ), cache)
    return cache


def test_a_second_load_does_not_compile(full_cache: Path) -> None:
    (built,) = full_cache.iterdir()
    before = built.stat()
    native_kernels(_environment(full_cache))
    assert list(full_cache.iterdir()) == [built]
    assert (built.stat().st_ino, built.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_of_several_that_need_a_build_at_once_one_compiles(tmp_path: Path) -> None:
    links = tmp_path / "links"
    body = f'[ "$1" != -shared ] || echo >> {links}; for last; do :; done; [ "$1" = --version ] || echo > "$last"'
    environment = _environment(tmp_path / "cache", CXX=_compiler_script(tmp_path, f"sleep 0.1; {body}"))
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(library_path, [environment] * 4))
    assert len(paths) == 1 and links.read_text() == "\n"


def test_without_a_compiler_the_reason_is_said(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailableError, match="no C\\+\\+ compiler"):
        native_kernels(_environment(tmp_path, PATH=str(tmp_path)))


def test_what_the_compiler_complains_of_is_said_and_nothing_is_kept(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    script = _compiler_script(tmp_path, 'case "$1" in --version) exit 0;; *) echo "line 3: bad" >&2; exit 1;; esac')
    with pytest.raises(NativeUnavailableError, match="line 3: bad"):
        native_kernels(_environment(cache, CXX=script))
    assert list(cache.iterdir()) == []


def test_a_library_that_does_not_load_is_said_so(tmp_path: Path) -> None:
    # Says its version, and writes something that is no library to where the last argument points.
    script = _compiler_script(tmp_path, 'for last; do :; done; [ "$1" = --version ] || echo nothing > "$last"')
    with pytest.raises(NativeUnavailableError, match="do not load"):
        native_kernels(_environment(tmp_path / "cache", CXX=script))


def test_a_library_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: half a library, kept where the power failed after the first start, ended each worker by SIGBUS."""
    script = _compiler_script(tmp_path, 'for last; do :; done; [ "$1" = --version ] || echo nothing > "$last"')
    synced: list[tuple[int, list[Path]]] = []

    def observed(fd: int) -> None:
        synced.append((os.fstat(fd).st_ino, list((tmp_path / "cache").glob("*.so"))))

    monkeypatch.setattr(os, "fsync", observed)
    path = library_path(_environment(tmp_path / "cache", CXX=script, QUIRE_NATIVE="compile"))
    assert synced == [(path.stat().st_ino, [])]


def test_what_builds_that_were_killed_have_left_is_removed_by_a_later_one(tmp_path: Path) -> None:
    """Regression: each Ctrl-C while kernels compiled left its folder for good."""
    script = _compiler_script(tmp_path, 'for last; do :; done; [ "$1" = --version ] || echo nothing > "$last"')
    cache = tmp_path / "cache"
    for name, age_s in (("build-killed", 2 * 3600), ("build-running", 60)):
        (cache / name).mkdir(parents=True)
        (cache / name / "a.o").touch()
        os.utime(cache / name, (time.time() - age_s,) * 2)
    path = library_path(_environment(cache, CXX=script, QUIRE_NATIVE="compile"))
    assert sorted(each.name for each in cache.iterdir()) == ["build-running", path.name]


def test_another_compiler_or_flag_is_another_build(tmp_path: Path) -> None:
    script = _compiler_script(tmp_path, 'for last; do :; done; [ "$1" = --version ] || echo nothing > "$last"')
    other = str(shutil.copy(script, tmp_path / "other"))
    environments = [_environment(tmp_path / "cache", CXX=compiler) for compiler in (script, other)]
    paths = {library_path(environment, flags) for environment in environments for flags in ((), ("-g",))}
    assert len(paths) == 4
    assert all(path.exists() for path in paths)


def test_they_can_be_switched_off(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailableError, match="QUIRE_NATIVE"):
        native_kernels(_environment(tmp_path, QUIRE_NATIVE="off"))


def test_builds_are_kept_where_the_user_keeps_caches() -> None:
    assert cache_directory({"QUIRE_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_directory({"XDG_CACHE_HOME": "/b", "HOME": "/c"}) == Path("/b/quire")
    assert cache_directory({"HOME": "/c"}) == Path("/c/.cache/quire")


def test_the_fallback_is_chosen_openly() -> None:
    kernels, reason = choose_kernels("auto", torch.float16)
    assert isinstance(kernels, TorchKernels)
    assert reason is not None and "float16" in reason
    assert choose_kernels("torch", torch.float32)[1] is None
    with pytest.raises(NativeUnavailableError, match="float16"):
        choose_kernels("native", torch.float16)


def test_heads_that_are_too_wide_are_a_reason_for_the_fallback() -> None:
    """Regression: an assertion ended the worker at its first step."""
    kernels, reason = choose_kernels("auto", torch.float32, 576)
    assert isinstance(kernels, TorchKernels)
    assert reason is not None and "heads of up to 512, not of 576" in reason
    assert isinstance(choose_kernels("auto", torch.float32, 512)[0], NativeKernels)
    with pytest.raises(NativeUnavailableError, match="576"):
        choose_kernels("native", torch.float32, 576)


def test_what_would_be_compiled_is_known_before(full_cache: Path, tmp_path: Path) -> None:
    """The start says so, since it takes long: once, and not where there is nothing to compile with."""
    environment = _environment(tmp_path / "empty", QUIRE_NATIVE="compile")
    assert needs_build(environment)
    assert not needs_build({**environment, "QUIRE_NATIVE": "off"})
    assert not needs_build({**environment, "CXX": str(tmp_path / "no-compiler")})
    kept = _environment(full_cache, QUIRE_NATIVE="compile")
    assert library_path(kept).exists() and not needs_build(kept)


def test_a_folder_of_builds_that_cannot_be_entered_is_a_reason_for_the_fallback(tmp_path: Path) -> None:
    """Regression: where HOME was another user's, as after `docker run --user`, each start of a worker failed."""
    environment = _environment(tmp_path / ("long" * 100), QUIRE_NATIVE="compile")  # a name that no folder can have
    assert needs_build(environment)
    with pytest.raises(NativeUnavailableError, match=r"cannot keep compiled kernels in .*; set QUIRE_CACHE_DIR"):
        library_path(environment)


def test_a_folder_of_builds_needs_no_place_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, or a root that is read only, has none, and workers are started again there, too."""
    monkeypatch.setattr(tempfile, "gettempdir", _no_room)
    assert cache_directory({"HOME": "/c"}) == Path("/c/.cache/quire")


@pytest.mark.parametrize("environment", [{}, {"HOME": ""}])
def test_builds_are_not_kept_where_everybody_may_write(environment: dict[str, str]) -> None:
    assert cache_directory(environment) == Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache" / "quire"


def test_a_user_without_a_home_keeps_builds_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pwd, "getpwuid", _no_entry)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = tmp_path / f"quire-{os.getuid()}"
    assert cache_directory({}) == made / ".cache" / "quire"
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o777)
    with pytest.raises(NativeUnavailableError, match=r"others may write .* QUIRE_CACHE_DIR"):
        cache_directory({})
    monkeypatch.setattr(tempfile, "gettempdir", _no_room)
    with pytest.raises(NativeUnavailableError, match="QUIRE_CACHE_DIR"):
        cache_directory({})


def _no_room() -> str:
    raise FileNotFoundError("no usable temporary directory")


def _no_entry(uid: int) -> pwd.struct_passwd:
    raise KeyError(uid)
