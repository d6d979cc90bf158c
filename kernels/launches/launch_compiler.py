"""Compiles recorded launches on several cores, into Triton's cache on disk, where the real launches find them.

Launches nothing; works without a GPU. The compiler lets go of the interpreter's lock for most of its time.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.launches.launch_recorder import WARP_SIZE, RecordedLaunch

OnPart = Callable[[float], None]  # gets the part that is done, from 0 to 1


def compile_launch(launch: RecordedLaunch, capability: int) -> Any:
    """Compile a recorded launch, as a launch on a device of that compute capability would; Triton's compiled kernel."""
    source = ASTSource(launch.kernel, launch.signature, constexprs=launch.constants, attrs=launch.attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, WARP_SIZE), options=dict(launch.options))


def compile_launches(
    launches: Sequence[RecordedLaunch], capability: int, num_threads: int, on_part: OnPart | None = None
) -> list[str]:
    """Compile launches side by side, telling `on_part` after each; the faults of those that the compiler refuses.

    Those of the longest kernels, which mostly take longest, come first, so that no thread begins one when others are
    done.
    """
    faults = []
    longest_first = sorted(launches, key=lambda launch: -len(launch.kernel.src))
    with ThreadPoolExecutor(num_threads) as pool:
        futures = {pool.submit(compile_launch, launch, capability): launch for launch in longest_first}
        for number, future in enumerate(as_completed(futures), 1):
            error = future.exception()
            if error is not None:
                faults.append(f"{futures[future]}: {type(error).__name__}: {error}")
            if on_part is not None:
                on_part(number / len(launches))
    return faults
