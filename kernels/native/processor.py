"""Instruction sets of the processor, as Linux names them."""

from pathlib import Path

from kernels.native.compiling import is_arm

_CPUINFO = Path("/proc/cpuinfo")


def processor_features(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """Names such as avx2, avx512_bf16, asimd, bf16; none if the system does not list them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def multiplies_bfloat16(features: frozenset[str]) -> str | None:
    """Instruction set that multiplies bfloat16 directly; None if bfloat16 is widened to float32 first."""
    known = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16"}
    if is_arm():
        known = {"bf16": "NEON BF16"}
    return next((name for feature, name in known.items() if feature in features), None)
