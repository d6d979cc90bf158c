"""The committed stubs are what `make protos` makes; the protos compile alone and break no client of a release."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.rpc import error_details_pb2

ROOT = Path(__file__).resolve().parent.parent
PROTOS = sorted(path.relative_to(ROOT / "protos").as_posix() for path in (ROOT / "protos/quire/v1").glob("*.proto"))
SCRIPTS = Path(sys.executable).parent


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stubs")
    plugins = [
        f"--plugin=protoc-gen-mypy={SCRIPTS / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={SCRIPTS / 'protoc-gen-mypy_grpc'}",
    ]
    outs = [f"--{kind}={out}" for kind in ("python_out", "grpc_python_out")]
    typed = [f"--{kind}=quiet:{out}" for kind in ("mypy_out", "mypy_grpc_out")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", *plugins, *outs, *typed, *PROTOS]
    subprocess.run(command, cwd=ROOT, check=True)
    return out / "quire/v1"


def test_committed_stubs_are_those_that_the_protos_make(generated: Path) -> None:
    fresh = {path.name: path.read_text() for path in generated.iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "quire/v1").glob("*_pb2*")}
    assert set(fresh) == set(committed)
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert not stale, f"run `make protos`: {stale} differ"


def test_protos_compile_alone(tmp_path: Path) -> None:
    """Compile with protoc's own files alone, as other languages do."""
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    files = sorted(each.relative_to(tmp_path / "protos").as_posix() for each in tmp_path.glob("protos/**/*.proto"))
    assert {"quire/v1/inference.proto", "google/rpc/status.proto", "google/rpc/error_details.proto"} <= set(files)
    out = tmp_path / "all.binpb"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", f"--descriptor_set_out={out}", *files]
    subprocess.run([*command, "--include_imports"], cwd=tmp_path, check=True)
    compiled = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    assert set(files) <= {each.name for each in compiled.file}
    for each in compiled.file:
        if each.package == "quire.v1":
            assert each.options.go_package == "quire/v1;quirev1"
            assert each.options.java_package == "quire.v1" and each.options.java_multiple_files


def test_the_copies_of_google_rpc_are_those_of_the_installed_package() -> None:
    installed = Path(error_details_pb2.__file__).parent
    for copy in (ROOT / "protos/google/rpc").glob("*.proto"):
        assert copy.read_text() == (installed / copy.name).read_text(), f"copy {copy.name} again"


def breaking(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPTS / "buf"), "breaking", "--against", str(ROOT / "protos/release.binpb")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_wire_breaks_no_client_of_the_last_release() -> None:
    result = breaking(ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("  string tenant = 8;", "  string tenant = 88;"),
        ("  optional uint32 max_tokens = 1;", ""),
        ("  rpc Cancel(CancelRequest) returns (CancelResponse);", ""),
        ("  REQUEST_STATE_PAUSED = 7;", "  REQUEST_STATE_HELD = 7;"),
        ("  int32 priority = 13;", "  string priority = 13;"),
    ],
)
def test_a_wire_that_breaks_clients_of_the_last_release_is_found(tmp_path: Path, written: str, instead: str) -> None:
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    proto = tmp_path / "protos/quire/v1/inference.proto"
    text = proto.read_text()
    assert text.count(written) == 1
    proto.write_text(text.replace(written, instead))
    assert breaking(tmp_path).returncode != 0
