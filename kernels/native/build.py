"""Finding the native kernels for this machine's processor: those of the wheel, else compiled at first use and cached.

The cache key is a hash of sources, flags, compiler and processor. Of processes that need a build at the same time one
compiles it, and the others wait. Knows no kernel.
"""

import fcntl
import hashlib
import os
import platform
import pwd
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kernels.native.compiling import (
    BUILD_PREFIX,
    FLAGS,
    SOURCES,
    NativeUnavailableError,
    compile_library,
    find_compiler,
    is_arm,
    run_compiler,
)
from kernels.native.processor import processor_features
from kernels.native.variants import Variant, prebuilt_for

_LONGEST_BUILD_S = 3600.0  # much longer than a compiler may take
_OFF = ("off", "0", "no", "false")
_ON = ("on", "1", "yes", "true", "auto")


def library_path(environment: Mapping[str, str], flags: Sequence[str] = ()) -> Path:
    """Path of the compiled library; build it now if there is none yet.

    `flags` make a separate build. Raises NativeUnavailableError, which says why, if it cannot be built.
    """
    if environment.get("QUIRE_NATIVE", "").lower() in _OFF:
        raise NativeUnavailableError("native kernels are switched off by QUIRE_NATIVE")
    prebuilt = prebuilt_library(environment, flags)
    if prebuilt is not None:
        return prebuilt[1]
    compiler = find_compiler(environment)
    path = _path(environment, flags)
    if not _is_kept(path):
        _build(compiler, _all_flags(flags), path)
    return path


def prebuilt_library(environment: Mapping[str, str], flags: Sequence[str] = ()) -> tuple[Variant, Path] | None:
    """The wheel's best variant for this processor; None if a library is compiled instead.

    QUIRE_NATIVE may name another variant, or say "compile". Raises NativeUnavailableError if that one is not here.
    """
    wish = environment.get("QUIRE_NATIVE", "").lower() or None
    if flags or wish == "compile" or wish in _OFF:
        return None
    wish = None if wish in _ON else wish
    found = prebuilt_for(processor_features(), name=wish)
    if found is None and wish is not None:
        raise NativeUnavailableError(
            f"QUIRE_NATIVE is {wish!r}: give off, compile, or a variant that the wheel has and the processor executes"
        )
    return found


def needs_build(environment: Mapping[str, str], flags: Sequence[str] = ()) -> bool:
    """True if `library_path` would compile now, which takes half a minute or more."""
    if environment.get("QUIRE_NATIVE", "").lower() in _OFF:
        return False
    try:
        return prebuilt_library(environment, flags) is None and not _is_kept(_path(environment, flags))
    except NativeUnavailableError:
        return False


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Folder of builds: QUIRE_CACHE_DIR, else the user's cache folder. Raises NativeUnavailableError without one."""
    if directory := environment.get("QUIRE_CACHE_DIR"):
        return Path(directory)
    if directory := environment.get("XDG_CACHE_HOME"):
        return Path(directory) / "quire"
    home = Path(environment["HOME"]) if environment.get("HOME") else _home()
    return home / ".cache" / "quire"


def _home() -> Path:
    """Home folder of this user, where no variable names it; without one a folder of its own among temporary files.

    Everybody may write among those, and whoever wrote a library for us would be executed. Raises
    NativeUnavailableError.
    """
    with suppress(KeyError):  # a user without an entry
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    try:
        folder = Path(tempfile.gettempdir()) / f"quire-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise NativeUnavailableError(
            f"there is no folder for compiled kernels: {error}; set QUIRE_CACHE_DIR"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise NativeUnavailableError(f"others may write {folder}: remove it, or set QUIRE_CACHE_DIR")
    return folder


def _path(environment: Mapping[str, str], flags: Sequence[str]) -> Path:
    """Path of a build, which may not exist yet. Raises NativeUnavailableError."""
    return cache_directory(environment) / f"kernels-{_key(find_compiler(environment), _all_flags(flags))}.so"


def _is_kept(path: Path) -> bool:
    """True for a build that this user can read; False also where the folder is another's, as with a home of root."""
    return os.access(path, os.R_OK)


def _all_flags(flags: Sequence[str]) -> tuple[str, ...]:
    return (*FLAGS, _tuning_flag(), *flags)


def _tuning_flag() -> str:
    return "-mcpu=native" if is_arm() else "-march=native"


def _key(compiler: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    version = run_compiler([compiler, "--version"])
    for part in (compiler, version, *flags, platform.machine(), _processor_features()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def _processor_features() -> str:
    """Lines of /proc/cpuinfo that determine what -march=native means; machines may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "vendor_id", "cpu family", "model", "CPU part")
    return "\n".join(sorted({line for line in lines if line.partition("\t")[0].strip(" :") in wanted}))


def _build(compiler: str, flags: Sequence[str], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(path.parent):
            if not _is_kept(path):
                _remove_left_builds(path.parent)
                compile_library(compiler, flags, path)
    except OSError as error:
        raise NativeUnavailableError(
            f"cannot keep compiled kernels in {path.parent}: {error}; set QUIRE_CACHE_DIR"
        ) from error


def _remove_left_builds(folder: Path) -> None:
    """Remove what builds have left that were killed; where a file system has no locks others may run."""
    for left in folder.glob(f"{BUILD_PREFIX}*"):
        with suppress(OSError):
            if left.stat().st_mtime < time.time() - _LONGEST_BUILD_S:
                shutil.rmtree(left)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, as far as its file system has locks. Ends with the process that holds it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
