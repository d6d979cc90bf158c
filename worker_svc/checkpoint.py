"""Finding a Hugging Face checkpoint and reading its files: config, safetensors, fingerprint.

Every refusal is a `CheckpointError` that says what to do. It knows file names and tensor names, not what a tensor
means to a model.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Self

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_HUB_ALLOWED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_HUB_IGNORED = ("*/*", "consolidated*")  # copies of the weights in other layouts
_HEADER_LENGTH_BYTES = 8
_SAMPLES_PER_FILE = 16
_SAMPLE_BYTES = 4096


class CheckpointError(ValueError):
    """This checkpoint cannot be served; the message says what to do."""


def resolve_checkpoint(name_or_path: str) -> Path:
    """The folder of a checkpoint: a local one, or a hub id, downloaded or from the local cache.

    Raises CheckpointError if there is none, or if it lacks a config or safetensors weights.
    """
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        folder = _download(name_or_path, folder)
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{folder} has no {CONFIG_FILE}: give the folder of a Hugging Face checkpoint "
            f"({CONFIG_FILE}, *.safetensors, tokenizer.json)"
        )
    weight_files(folder)
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint's file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}): download the checkpoint again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object: download the checkpoint again")
    return content


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint, sorted: those of the index if there is one, else all there are."""
    if (folder / INDEX_FILE).is_file():
        weight_map: Mapping[str, str] = read_json(folder / INDEX_FILE).get("weight_map", {})
        files = sorted({folder / name for name in weight_map.values()})
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(f"{folder} lacks {', '.join(missing)}, named in {INDEX_FILE}: download it again")
    else:
        files = sorted(folder.glob("*.safetensors"))
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


def fingerprint(folder: Path) -> str:
    """sha256 over config and tokenizer files, and the headers, sizes and samples of the weight files.

    Cheap whatever the size of the weights, and independent of where the folder lies.
    """
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, *TOKENIZER_FILES):
        if (folder / name).is_file():
            _add(digest, name.encode(), (folder / name).read_bytes())
    for file in weight_files(folder):
        with file.open("rb") as stream:
            _add(digest, file.name.encode(), *_characteristic_bytes(stream, file.stat().st_size))
    return digest.hexdigest()


class WeightReader:
    """The tensors of a checkpoint by name, over all its files; a context manager, since it holds them open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}  # by tensor name; safetensors has no type for its handle

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for file in weight_files(self.folder):
                try:
                    handle = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
                except (SafetensorError, OSError) as error:
                    raise CheckpointError(f"{file} is damaged ({error}): download it again") from error
                self._handles.update(dict.fromkeys(handle.keys(), handle))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        """The tensor, on the CPU and in the dtype of the file; raises CheckpointError unless it has this shape."""
        if name not in self._handles:
            raise CheckpointError(
                f"{self.folder} has no tensor {name!r}, which its {CONFIG_FILE} calls for: "
                "the weights are incomplete or belong to another model; download the checkpoint again"
            )
        found = list(self._handles[name].get_slice(name).get_shape())
        if found != list(shape):
            raise CheckpointError(
                f"tensor {name!r} in {self.folder} has shape {found}, and {CONFIG_FILE} calls for {list(shape)}: "
                "the two files do not belong together; download the checkpoint again"
            )
        tensor: Tensor = self._handles[name].get_tensor(name)
        return tensor


def _download(name: str, folder: Path) -> Path:
    if folder.is_file():
        raise CheckpointError(f"{name} is a file: give the folder that holds it")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CheckpointError(f"there is no folder {name}: check the path, or give the id of a model on the hub")
    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_ALLOWED), ignore_patterns=list(_HUB_IGNORED)))
    except HFValidationError as error:
        raise CheckpointError(f"{name!r} is neither a folder nor a valid hub id (owner/model): check it") from error
    except Exception as error:  # whatever the HTTP library under the hub client raises: which one, differs by version
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{name!r} is no local folder, and the hub does not give a model of that name ({reason}): check the "
            "spelling and the network, set HF_TOKEN if the model is gated, or give the path of a local folder"
        ) from error


def _characteristic_bytes(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """Size, header (names, dtypes, shapes), and evenly spaced samples of the data, which tell fine-tunes apart."""
    yield size.to_bytes(8, "little")
    header_bytes = int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
    yield stream.read(min(header_bytes, size))
    start = stream.tell()
    for sample in range(_SAMPLES_PER_FILE):
        stream.seek(start + (size - start) * sample // _SAMPLES_PER_FILE)
        yield stream.read(_SAMPLE_BYTES)


def _add(digest: "hashlib._Hash", *parts: bytes) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
