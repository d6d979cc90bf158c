"""Comments of the fields of the protos, by their full names, as protoc reads them."""

import subprocess
import sys
from pathlib import Path

from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parent.parent


def comments_of_fields(folder: Path) -> dict[str, str]:
    """Comments of all fields, each on one line. The folder takes what protoc writes."""
    out = folder / "protos.binpb"
    files = [f"quire/v1/{name}.proto" for name in ("inference", "cluster", "worker")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", "--include_source_info"]
    subprocess.run([*command, f"--descriptor_set_out={out}", *files], cwd=ROOT, check=True)
    comments = {}
    for file in descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file:
        for location in file.source_code_info.location:
            if len(location.path) == 4 and (location.path[0], location.path[2]) == (4, 2):
                message = file.message_type[location.path[1]]
                name = f"{file.package}.{message.name}.{message.field[location.path[3]].name}"
                comments[name] = " ".join(location.leading_comments.split())
    return comments
