"""The committed stubs are what `make protos` makes of the .proto files."""

import subprocess
import sys
from pathlib import Path

import pytest

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
