"""The wheel as users get it: native kernels in every variant, no compiler needed, and nothing but `quire` imported."""

import json
import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from kernels.native.processor import processor_features
from kernels.native.variants import Variant, variants_for
from tests.services import ROOT

VARIANTS = variants_for()
EXECUTABLE = [each for each in VARIANTS if each.features <= processor_features()]
BUILD_S = 600.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(BUILD_S)]


def build(folder: Path, environment: Mapping[str, str], root: Path = ROOT) -> tuple[Path, str]:
    """The wheel, without a package index, and what was said meanwhile."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(
        command, cwd=root, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"), {"QUIRE_BUILD_KERNELS": "required"})[0]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel brings, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    options = ["--no-deps", "--no-index", "--no-compile", "-q", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True, capture_output=True)
    return folder


def run(arguments: Sequence[str], cwd: Path, *paths: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python with these folders before all others."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_wheel_has_every_variant_and_is_for_this_platform(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {each.file_name for each in VARIANTS} == {Path(each).name for each in names if "prebuilt" in each}
    assert wheel.stem.endswith(f"-py3-none-linux_{platform.machine()}")
    assert {name.split("/")[0] for name in names if not name.startswith("quire_llm-")} == {
        "quire",
        "scheduler_svc",
        "worker_svc",
        "gateway_svc",
        "kernels",
        "common",
    }


@pytest.mark.parametrize("variant", EXECUTABLE, ids=lambda each: each.name)
def test_without_a_compiler_each_variant_that_the_processor_has_computes_what_torch_does(
    variant: Variant, installed: Path, tmp_path: Path
) -> None:
    done = run(
        ["-P", "-m", "tests.wheel.variant_numerics", variant.name],
        *(tmp_path, installed, ROOT),
        PATH=str(tmp_path),
        QUIRE_CACHE_DIR=str(tmp_path / "cache"),
        QUIRE_NATIVE=variant.name,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "cache").exists()


def test_the_best_variant_is_taken_by_itself_and_nothing_is_compiled(installed: Path, tmp_path: Path) -> None:
    program = (
        "import os\n"
        "from kernels.native.build import library_path, needs_build\n"
        "print(library_path(os.environ), needs_build(os.environ))"
    )
    done = run(["-P", "-c", program], tmp_path, installed, PATH=str(tmp_path), QUIRE_NATIVE="")
    best = installed / "kernels" / "native" / "prebuilt" / EXECUTABLE[0].file_name
    assert done.stdout.split() == [str(best), "False"], done.stderr


def test_where_nothing_compiles_the_wheel_is_pure_with_a_warning_unless_kernels_are_required(tmp_path: Path) -> None:
    made, said = build(tmp_path / "auto", {"CXX": "no-such-compiler"})
    assert made.stem.endswith("-py3-none-any")
    assert "no native kernels" in said and "no-such-compiler was not found" in said
    made, said = build(tmp_path / "off", {"QUIRE_BUILD_KERNELS": "off"})
    assert made.stem.endswith("-py3-none-any") and "no native kernels" not in said
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    failing = {"QUIRE_BUILD_KERNELS": "required", "CXX": "no-such-compiler", "TMPDIR": str(temporary)}
    with pytest.raises(AssertionError, match="no-such-compiler was not found"):
        build(tmp_path / "required", failing)
    assert list(temporary.iterdir()) == []


def test_kernels_that_were_compiled_before_go_into_the_wheel_as_they_are(tmp_path: Path) -> None:
    """Images do so, in a layer of their own."""
    for variant in VARIANTS:
        (tmp_path / variant.file_name).write_bytes(variant.name.encode())
    made, _ = build(tmp_path / "made", {"QUIRE_BUILT_KERNELS": str(tmp_path), "CXX": "no-such-compiler"})
    with zipfile.ZipFile(made) as archive:
        found = {name: archive.read(name).decode() for name in archive.namelist() if "/prebuilt/" in name}
    assert found == {f"kernels/native/prebuilt/{each.file_name}": each.name for each in VARIANTS}


def test_the_sdk_lives_beside_a_users_own_common_and_protos(installed: Path, tmp_path: Path) -> None:
    """Among them an inference.proto that is registered before ours, under the path that ours once had."""
    user = tmp_path / "user"
    (user / "protos").mkdir(parents=True)
    (user / "common.py").write_text("MINE = True\n")
    (user / "protos" / "__init__.py").write_text("")
    (user / "protos" / "inference.proto").write_text(
        'syntax = "proto3";\npackage mine;\nmessage GenerateRequest { string mine = 1; }\n'
    )
    protoc = ["-m", "grpc_tools.protoc", f"-I{user}", f"--python_out={user}", "protos/inference.proto"]
    assert run(protoc, user).returncode == 0
    program = (
        "import json, sys\n"
        "import protos.inference_pb2 as mine\n"
        "import quire\n"
        "quire.Client, quire.AsyncClient\n"
        "ours = sorted(name for name in sys.modules)\n"
        "import common\n"
        "assert common.MINE and mine.GenerateRequest(mine='x').mine == 'x'\n"
        "print(json.dumps([quire.__file__, ours]))"
    )
    (user / "program.py").write_text(program)
    done = run(["program.py"], user, installed)
    assert done.returncode == 0, done.stderr
    path, loaded = json.loads(done.stdout)
    assert Path(path).is_relative_to(installed)
    heavy = {"torch", "redis", "common", "transformers", "numpy", "pydantic", "typer", "structlog", "kernels"}
    assert not heavy & {name.split(".")[0] for name in loaded}
