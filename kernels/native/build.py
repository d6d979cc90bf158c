"""Compiling the native kernels at first use, for the processor at hand, and keeping what was compiled.

A build is found again by a hash of all that it depends on: sources, flags, compiler, processor. It is put in place by
renaming, so processes that build at once do not disturb each other. It knows no kernel.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernels.native.cpu_kernels import NativeUnavailableError

SOURCES = Path(__file__).parent / "src"
_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"),
    *("-fno-exceptions", "-fno-rtti", "-Wall", "-Wextra"),
)
_TIMEOUT_S = 300
_ERROR_LINES = 8
_OFF = ("off", "0", "no", "false")


def library_path(environment: Mapping[str, str], flags: Sequence[str] = ()) -> Path:
    """The compiled library, built now if it is not there yet.

    Raises NativeUnavailableError, which says why, if it cannot be built.
    """
    if environment.get("QUIRE_NATIVE", "").lower() in _OFF:
        raise NativeUnavailableError("native kernels are switched off by QUIRE_NATIVE")
    compiler = _compiler(environment)
    path = _path(environment, flags)
    if not path.exists():
        _build(compiler, _all_flags(flags), path)
    return path


def needs_build(environment: Mapping[str, str], flags: Sequence[str] = ()) -> bool:
    """Whether `library_path` would compile now, which takes half a minute or more."""
    if environment.get("QUIRE_NATIVE", "").lower() in _OFF:
        return False
    try:
        return not _path(environment, flags).exists()
    except NativeUnavailableError:
        return False


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Where builds are kept: QUIRE_CACHE_DIR, else the user's cache."""
    if directory := environment.get("QUIRE_CACHE_DIR"):
        return Path(directory)
    if directory := environment.get("XDG_CACHE_HOME"):
        return Path(directory) / "quire"
    return Path(environment.get("HOME", tempfile.gettempdir())) / ".cache" / "quire"


def _path(environment: Mapping[str, str], flags: Sequence[str]) -> Path:
    """Where a build lies, or will lie. Raises NativeUnavailableError."""
    return cache_directory(environment) / f"kernels-{_key(_compiler(environment), _all_flags(flags))}.so"


def _all_flags(flags: Sequence[str]) -> tuple[str, ...]:
    return (*_FLAGS, _tuning_flag(), *flags)


def _compiler(environment: Mapping[str, str]) -> str:
    """GCC, or what CXX names."""
    name = environment.get("CXX") or "g++"
    compiler = shutil.which(name, path=environment.get("PATH"))
    if compiler is None:
        raise NativeUnavailableError(f"there is no C++ compiler: {name} was not found; install g++ or set CXX")
    return compiler


def _tuning_flag() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _key(compiler: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    version = _run([compiler, "--version"])
    for part in (compiler, version, *flags, platform.machine(), _processor_features()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def _processor_features() -> str:
    """What -march=native looks at, as the kernel says it; a cache may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "vendor_id", "cpu family", "model", "CPU part")
    return "\n".join(sorted({line for line in lines if line.partition("\t")[0].strip(" :") in wanted}))


def _build(compiler: str, flags: Sequence[str], path: Path) -> None:
    """Each source on its own, several at once, then the library, which appears under its name when it is whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
            sources = sorted(SOURCES.glob("*.cpp"))
            objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
            with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
                commands = [
                    [compiler, *flags, "-c", str(source), "-o", made]
                    for source, made in zip(sources, objects, strict=True)
                ]
                list(pool.map(_run, commands))
            library = Path(folder) / "kernels.so"
            _run([compiler, "-shared", "-pthread", *objects, "-o", str(library)])
            library.replace(path)
    except OSError as error:
        raise NativeUnavailableError(f"cannot keep compiled kernels in {path.parent}: {error}") from error


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailableError(f"{command[0]} took more than {_TIMEOUT_S} s") from error
    except OSError as error:
        raise NativeUnavailableError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[:_ERROR_LINES])
        raise NativeUnavailableError(f"{command[0]} failed: {said}")
    return done.stdout
