"""Variants of the native kernels: which suits a processor, and that each is right wherever it compiles and runs."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.native.build import library_path
from kernels.native.compiling import FLAGS, SOURCES, NativeUnavailableError, is_arm
from kernels.native.processor import multiplies_bfloat16, processor_features
from kernels.native.variants import VARIANTS, Variant, prebuilt_for

CHECK = Path(__file__).with_name("variant_check.cpp")
SAPPHIRE_RAPIDS = frozenset().union(*(each.features for each in VARIANTS if not each.is_arm))
ZEN_4 = next(each.features for each in VARIANTS if each.name == "avx512-bf16")
HASWELL = next(each.features for each in VARIANTS if each.name == "avx2")
SKYLAKE = next(each.features for each in VARIANTS if each.name == "avx512")
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"


def runs_here(variant: Variant) -> bool:
    """True if the variant runs on this processor, or if a cross compiler and an emulator are installed."""
    if variant.is_arm == is_arm():
        return variant.features <= processor_features()
    return variant.is_arm and shutil.which(ARM_COMPILER) is not None and shutil.which(ARM_EMULATOR) is not None


@pytest.mark.long
@pytest.mark.parametrize("variant", [each for each in VARIANTS if runs_here(each)], ids=lambda each: each.name)
def test_products_and_roundings_of_each_variant_are_right(variant: Variant, tmp_path: Path) -> None:
    program = tmp_path / "check"
    compiler, run = ["g++"], [str(program)]
    if variant.is_arm and not is_arm():
        compiler, run = [ARM_COMPILER, "-static"], [ARM_EMULATOR, "-cpu", "max", str(program)]
    sources = [str(CHECK), str(SOURCES / "product.cpp"), str(SOURCES / "team.cpp")]
    flags = [*FLAGS, *variant.flags, "-I", str(SOURCES)]
    subprocess.run([*compiler, *flags, *sources, "-o", str(program)], check=True, capture_output=True)
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("features", "machine", "name"),
    [
        (SAPPHIRE_RAPIDS, "x86_64", "amx"),
        (ZEN_4, "x86_64", "avx512-bf16"),
        (SKYLAKE, "x86_64", "avx512"),
        (HASWELL, "x86_64", "avx2"),
        (ZEN_4 - {"avx512bw"}, "x86_64", "avx2"),
        ({"sse2"}, "x86_64", None),
        ({"asimd", "bf16", "sve"}, "aarch64", "neon-bf16"),
        ({"asimd"}, "arm64", "neon"),
        (ZEN_4, "riscv64", None),
    ],
)
def test_a_processor_gets_the_best_that_it_can_execute(
    features: frozenset[str], machine: str, name: str | None, tmp_path: Path
) -> None:
    for each in VARIANTS:
        (tmp_path / each.file_name).touch()
    found = prebuilt_for(features, machine, tmp_path)
    assert (found and found[0].name) == name


def test_what_the_wheel_lacks_is_not_chosen(tmp_path: Path) -> None:
    assert prebuilt_for(ZEN_4, "x86_64", tmp_path) is None
    (tmp_path / "kernels-avx2.so").touch()
    found = prebuilt_for(ZEN_4, "x86_64", tmp_path)
    assert found is not None and found[0].name == "avx2"
    assert prebuilt_for(ZEN_4, "x86_64", tmp_path, name="avx512") is None


def test_a_variant_that_is_asked_for_and_not_here_is_said_so() -> None:
    with pytest.raises(NativeUnavailableError, match="QUIRE_NATIVE is 'avx1024': give off, compile, or a variant"):
        library_path({"QUIRE_NATIVE": "avx1024"})


def test_features_are_read_as_linux_writes_them_on_either_kind_of_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert processor_features(cpuinfo) == {"fpu", "avx2", "avx512_bf16"}
    cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 1\nFeatures\t: fp asimd bf16\n")
    assert processor_features(cpuinfo) == {"fp", "asimd", "bf16"}
    assert processor_features(tmp_path / "missing") == frozenset()


def test_bfloat16_is_multiplied_by_amx_before_avx512_and_not_by_avx2() -> None:
    if is_arm():
        assert multiplies_bfloat16(frozenset({"asimd", "bf16"})) == "NEON BF16"
        return
    assert multiplies_bfloat16(ZEN_4) == "AVX-512 BF16"
    assert multiplies_bfloat16(SAPPHIRE_RAPIDS) == "AMX"
    assert multiplies_bfloat16(HASWELL) is None
