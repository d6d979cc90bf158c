"""Variants of the native kernels in a wheel, and the choice of the best one for a processor.

Needs only the standard library: the build of a wheel uses it too.
"""

import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from kernels.native.compiling import is_arm

PREBUILT = Path(__file__).parent / "prebuilt"  # in an installed wheel; a source checkout has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One build of the kernels, and the processor features that it needs, as named in /proc/cpuinfo."""

    name: str
    is_arm: bool
    flags: tuple[str, ...]
    features: frozenset[str]

    @property
    def file_name(self) -> str:
        return f"kernels-{self.name}.so"


# Levels 3 and 4 of x86-64, as the psABI defines them.
_AVX2 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = ("avx512bf16", "avx512vnni", "avx512vbmi")

_AVX512_BF16 = _AVX512 | {"avx512_bf16", "avx512_vnni", "avx512vbmi"}
_AMX = ("amx-tile", "amx-bf16")

# Best first, for each kind of processor.
VARIANTS = (
    Variant(
        name="amx",
        is_arm=False,
        flags=("-march=x86-64-v4", *(f"-m{each}" for each in (*_BF16, *_AMX))),
        features=_AVX512_BF16 | {"amx_tile", "amx_bf16"},
    ),
    Variant(
        name="avx512-bf16",
        is_arm=False,
        flags=("-march=x86-64-v4", *(f"-m{each}" for each in _BF16)),
        features=_AVX512_BF16,
    ),
    Variant(name="avx512", is_arm=False, flags=("-march=x86-64-v4",), features=_AVX512),
    Variant(name="avx2", is_arm=False, flags=("-march=x86-64-v3",), features=_AVX2),
    Variant(name="neon-bf16", is_arm=True, flags=("-march=armv8.2-a+bf16",), features=frozenset({"asimd", "bf16"})),
    Variant(name="neon", is_arm=True, flags=("-march=armv8-a",), features=frozenset({"asimd"})),
)


def variants_for(machine: str = platform.machine()) -> list[Variant]:
    """Variants for a kind of processor, as named by `uname -m`; best first."""
    if is_arm(machine):
        return [each for each in VARIANTS if each.is_arm]
    return [each for each in VARIANTS if not each.is_arm and machine in ("x86_64", "AMD64")]


def prebuilt_for(
    features: Collection[str], machine: str = platform.machine(), folder: Path = PREBUILT, *, name: str | None = None
) -> tuple[Variant, Path] | None:
    """Best prebuilt variant, or the named one, that exists and that a processor with these features can execute."""
    for each in variants_for(machine):
        path = folder / each.file_name
        if name in (None, each.name) and each.features.issubset(features) and path.is_file():
            return each, path
    return None
