"""Compiles every variant of the native kernels for this kind of processor.

    python3 -m kernels.native.prebuilding FOLDER

Needs only the standard library and a compiler: the build of a wheel uses it too.
"""

import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from kernels.native.compiling import FLAGS, compile_library, find_compiler
from kernels.native.variants import variants_for

# The C++ library goes along: the one of the machine that installs the wheel may be older.
_LINK_FLAGS = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL")


def compile_variants(folder: Path, say: Callable[[str], object]) -> None:
    """Compile into a folder that is there. Raises RuntimeError without a compiler or variants, or if one fails."""
    compiler = find_compiler(os.environ)
    variants = variants_for(platform.machine())
    if not variants:
        raise RuntimeError(f"there are no variants for {platform.machine()}")
    for variant in variants:
        say(f"compiling native kernels for {variant.name}")
        compile_library(compiler, (*FLAGS, *variant.flags), folder / variant.file_name, _LINK_FLAGS)


if __name__ == "__main__":
    compile_variants(Path(sys.argv[1]), lambda text: sys.stderr.write(f"{text}\n"))
