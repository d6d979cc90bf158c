"""The safetensors files of a model folder: finds them and reads their headers, before any tensor is read."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.checkpoint.folder_files import find_file, reading
from worker_svc.checkpoint.json_file import read_table

INDEX_FILE = "model.safetensors.index.json"
WHOLE_FILE = "model.safetensors"
FLOATING_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
HEADER_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 32 << 20
_MOST_INDEX_BYTES = 64 << 20
_MOST_FILES = 4096
_LONGEST_NAME = 255
_LFS_POINTER = b"version https://git-lfs"  # what a clone without Git LFS has instead of a large file
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
}


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """File, dtype, shape and place of one tensor, from the header of its file."""

    file: str
    dtype: str  # as the file spells it, "BF16"
    shape: tuple[int, ...]
    begin: int = 0  # of its bytes in the file
    end: int = 0


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The files that hold the weights, sorted: model.safetensors, else those of the index, else all in the folder.

    Raises CheckpointError if there are none, if one that the index names is missing, or if the index names a path
    outside the folder itself.
    """
    if find_file(folder, WHOLE_FILE) is not None:
        return (folder / WHOLE_FILE,)
    named = _indexed_files(folder)
    if named is None:
        named = sorted(file.name for file in folder.glob("*.safetensors"))
    files = [path for path in (find_file(folder, name) for name in named) if path is not None]
    if files:
        return tuple(files)
    pickles = sorted(file.name for pattern in _PICKLE_PATTERNS for file in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights only as pickle ({', '.join(pickles[:3])}), which can run code when loaded: "
            "convert to safetensors, for example with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise CheckpointError(
        f"{folder} has no *.safetensors file: download the weights, or, if they are published only as "
        "pytorch_model.bin, convert to safetensors"
    )


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Headers of the tensors in the weight files, by name.

    Raises CheckpointError for a damaged file, and for a tensor that two files have where no index names them.
    """
    headers: dict[str, TensorHeader] = {}
    is_indexed = find_file(folder, INDEX_FILE) is not None
    for file in weight_files(folder):
        of_file = file_headers(file)
        repeated = min(of_file.keys() & headers.keys(), default=None)
        if repeated is not None and not is_indexed:
            raise CheckpointError(
                f"{folder} has tensor {repeated!r} both in {headers[repeated].file} and in {file.name}, and no "
                f"{INDEX_FILE} says which files belong together: keep the files of one model alone"
            )
        headers.update(of_file)
    return headers


def file_headers(path: Path) -> dict[str, TensorHeader]:
    """Headers of the tensors of one file, by name. Raises CheckpointError for a damaged file."""
    with reading(path), path.open("rb") as stream:
        return _parse_headers(path, stream, path.stat().st_size)


def check_tensor(folder: Path, name: str, header: TensorHeader | None, shape: Sequence[int]) -> None:
    """Raises CheckpointError unless the tensor exists, has floating point numbers, and has this shape."""
    if header is None:
        raise CheckpointError(
            f"{folder} has no tensor {name!r}, which its config.json calls for: "
            "the weights are incomplete or belong to another model; download the checkpoint again"
        )
    if header.shape != tuple(shape):
        raise CheckpointError(
            f"tensor {name!r} in {folder} has shape {list(header.shape)}, and config.json calls for {list(shape)}: "
            "the two files do not belong together; download the checkpoint again"
        )
    if header.dtype not in FLOATING_DTYPES:
        raise CheckpointError(
            f"tensor {name!r} in {folder} is stored as {header.dtype}, and Quire reads {', '.join(FLOATING_DTYPES)}: "
            "choose a checkpoint that is not quantised"
        )


def _indexed_files(folder: Path) -> list[str] | None:
    """Files that the index names; None without an index. Raises CheckpointError for a name that is no file here."""
    index = read_table(folder, INDEX_FILE, _MOST_INDEX_BYTES)
    if index is None:
        return None
    weight_map = index.table("weight_map")
    if weight_map is None:
        index.refuse("weight_map", "must name the file of each tensor")
    by_name = {weight_map.text(tensor): tensor for tensor in weight_map.keys}
    if len(by_name) > _MOST_FILES:
        index.refuse("weight_map", f"names more than {_MOST_FILES} files")
    for name, tensor in by_name.items():
        is_plain = name.isprintable() and len(name) <= _LONGEST_NAME and "/" not in name and "\\" not in name
        if not is_plain or not name.endswith(".safetensors"):
            weight_map.refuse(tensor, "must name a *.safetensors file in the same folder")
    missing = sorted(name for name in by_name if find_file(folder, name) is None)
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise CheckpointError(f"{folder} lacks {shown}, named in {INDEX_FILE}: download it again")
    return sorted(by_name)


def _parse_headers(path: Path, stream: BinaryIO, size: int) -> dict[str, TensorHeader]:
    length = int.from_bytes(stream.read(HEADER_LENGTH_BYTES), "little")
    if size < HEADER_LENGTH_BYTES or length > min(size - HEADER_LENGTH_BYTES, _MOST_HEADER_BYTES):
        stream.seek(0)
        if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CheckpointError(
                f"{path} is a pointer of Git LFS, not the weights themselves: run git lfs pull in its folder"
            )
        raise _damaged(path, f"its {size} bytes do not begin with a header")
    try:
        entries = json.loads(stream.read(length).decode())
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "its header is not JSON") from error
    if not isinstance(entries, dict):
        raise _damaged(path, "its header is no JSON object")
    entries.pop("__metadata__", None)
    return {
        name: _parse_entry(path, name, entry, HEADER_LENGTH_BYTES + length, size) for name, entry in entries.items()
    }


def _parse_entry(path: Path, name: str, entry: object, start: int, size: int) -> TensorHeader:
    data_bytes = size - start
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            if not all(type(each) is int and 0 <= each < 1 << 48 for each in shape):
                raise _damaged(path, f"the shape of tensor {name!r} is not a list of sizes")
            num_bits = _BITS.get(dtype)
            if not 0 <= begin <= end <= data_bytes:
                raise _damaged(path, f"tensor {name!r} would end at byte {end} of {data_bytes}: the file is cut off")
            if num_bits is not None and prod(shape) * num_bits != 8 * (end - begin):
                raise _damaged(path, f"the size of tensor {name!r} does not fit its shape and dtype")
            return TensorHeader(path.name, dtype, tuple(shape), start + begin, start + end)
        case _:
            raise _damaged(path, f"its header does not describe tensor {name!r} by dtype, shape and offsets")


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged ({reason}): download it again")
