"""Compiling the native kernels: their sources, the common flags, and the library.

Needs only the standard library and a compiler: the build of a wheel uses it too. Knows no kernel, and not where a
library is kept.
"""

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"),
    *("-fno-exceptions", "-fno-rtti", "-Wall", "-Wextra"),
)
BUILD_PREFIX = "build-"  # of folders in which a library is compiled
_TIMEOUT_S = 300
_ERROR_LINES = 8


class NativeUnavailableError(RuntimeError):
    """Native kernels cannot be used here; the message says why."""


def is_arm(machine: str = platform.machine()) -> bool:
    """True if `machine` names 64-bit ARM processors."""
    return machine in ("aarch64", "arm64")


def find_compiler(environment: Mapping[str, str]) -> str:
    """Path of GCC, or of the compiler that CXX names. Raises NativeUnavailableError."""
    name = environment.get("CXX") or "g++"
    compiler = shutil.which(name, path=environment.get("PATH"))
    if compiler is None:
        raise NativeUnavailableError(f"there is no C++ compiler: {name} was not found; install g++ or set CXX")
    return compiler


def compile_library(compiler: str, flags: Sequence[str], path: Path, link_flags: Sequence[str] = ()) -> None:
    """Compile each source separately, several at once, then link; the library gets its name once it is complete.

    Raises NativeUnavailableError with the compiler's output, or OSError.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=BUILD_PREFIX) as folder:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            commands = [
                [compiler, *flags, "-c", str(source), "-o", made] for source, made in zip(sources, objects, strict=True)
            ]
            list(pool.map(run_compiler, commands))
        library = Path(folder) / "kernels.so"
        run_compiler([compiler, "-shared", "-pthread", *link_flags, *objects, "-o", str(library)])
        with library.open("rb") as built:  # on the disk before it has its name: half a library ends who loads it
            os.fsync(built.fileno())
        library.replace(path)


def run_compiler(command: Sequence[str]) -> str:
    """Run the compiler and return what it prints. Raises NativeUnavailableError with its error output."""
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
