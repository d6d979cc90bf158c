"""Finds the folder of a Hugging Face checkpoint, local or from the hub, and computes its fingerprint.

Every error is a `CheckpointError` that says what to do. Does not parse the files.
"""

import errno
import hashlib
from pathlib import Path

from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.checkpoint.folder_files import find_file, read_file
from worker_svc.checkpoint.json_file import MOST_BYTES
from worker_svc.checkpoint.weight_files import weight_files
from worker_svc.checkpoint.weight_samples import weight_samples

CONFIG_FILE = "config.json"
MOST_TOKENIZER_BYTES = 64 << 20
TEMPLATE_FILE = "chat_template.jinja"
TOOLS_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"  # where `transformers` saves named templates
# Files that decide a model's output, beside config and weights.
_TEXT_FILES = {
    "tokenizer.json": MOST_TOKENIZER_BYTES,
    "tokenizer.model": MOST_TOKENIZER_BYTES,
    "vocab.json": MOST_TOKENIZER_BYTES,
    "vocab.txt": MOST_TOKENIZER_BYTES,
    "merges.txt": MOST_TOKENIZER_BYTES,
    "added_tokens.json": MOST_BYTES,
    "tokenizer_config.json": MOST_BYTES,
    "special_tokens_map.json": MOST_BYTES,
    TEMPLATE_FILE: MOST_BYTES,
    TOOLS_TEMPLATE_FILE: MOST_BYTES,
    "chat_template.json": MOST_BYTES,
    "generation_config.json": MOST_BYTES,
}
_ADAPTER_FILE = "adapter_config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_HUB_ALLOWED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
# Copies of the weights in other layouts; below the folder itself only templates are needed.
_HUB_IGNORED = ("*/*.json", "*/*.safetensors", "*/*.model", "*/*.txt", "consolidated*")
_UNWRITABLE = (errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS)  # of errors on the disk
_VERSION = b"by tensors"  # of the fingerprint; another version gives each model another


def resolve_checkpoint(name_or_path: str) -> Path:
    """The folder of a checkpoint: a local one, or a hub id, downloaded or from the local cache.

    Raises CheckpointError if there is none, or if it lacks a config or safetensors weights.
    """
    folder = _local_folder(name_or_path)
    if folder is None:
        folder = _snapshot(name_or_path, local_files_only=False)
        assert folder is not None, "a download gives a folder or fails"
    _check_complete(folder)
    return folder


def find_checkpoint(name_or_path: str) -> Path | None:
    """Find a checkpoint like `resolve_checkpoint`, but without network: None for a hub id outside the local cache.

    Also None where the cache lacks some of its files, as after the tokenizer alone was used: a download brings them.
    """
    folder = _local_folder(name_or_path)
    if folder is not None:
        _check_complete(folder)
        return folder
    folder = _snapshot(name_or_path, local_files_only=True)
    return folder if folder is not None and _is_complete(folder) else None


def fingerprint(folder: Path) -> str:
    """SHA-256 over config and tokenizer files, and of the weight files their sizes, headers and samples of each tensor.

    Models with other tensors differ, and those with a tensor whose samples differ, as after any training of it or a
    merged adapter. A change of a few numbers between the samples of a tensor is not seen: `weight_samples` says where
    they lie. The same weights in other files differ. It does not depend on the folder's path.
    """
    digest = hashlib.sha256(_VERSION)
    for name, most_bytes in {CONFIG_FILE: MOST_BYTES, **_TEXT_FILES}.items():
        content = read_file(folder, name, most_bytes)
        if content is not None:
            _add(digest, name.encode(), content)
    files = weight_files(folder)
    for file, samples in zip(files, weight_samples(files), strict=True):
        _add(digest, file.name.encode(), *samples)
    return digest.hexdigest()


def is_local(name_or_path: str) -> bool:
    """True for a local folder, False for a model on the hub. Raises CheckpointError if it can be neither."""
    return _local_folder(name_or_path) is not None


def _is_complete(folder: Path) -> bool:
    try:
        _check_complete(folder)
    except CheckpointError:
        return False
    return True


def _check_complete(folder: Path) -> None:
    _check_without_adapter(folder)
    if find_file(folder, CONFIG_FILE) is None:
        raise CheckpointError(
            f"{folder} has no {CONFIG_FILE}: give the folder of a Hugging Face checkpoint "
            f"({CONFIG_FILE}, *.safetensors, tokenizer.json)"
        )
    weight_files(folder)


def _check_without_adapter(folder: Path) -> None:
    """Raises CheckpointError for an adapter, alone or beside its base model: without it other answers would come."""
    weights = next((name for name in _ADAPTER_WEIGHTS if find_file(folder, name) is not None), None)
    if weights is None or find_file(folder, _ADAPTER_FILE) is None:
        return
    raise CheckpointError(
        f"{folder} holds an adapter ({_ADAPTER_FILE}, {weights}), which Quire does not apply: merge it into its base "
        "model, for example with peft: AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload()"
        ".save_pretrained(new_folder); if the weights beside it are merged already, remove these files"
    )


def _local_folder(name: str) -> Path | None:
    """The local folder; None if the name can only be a hub id."""
    try:
        folder = Path(name).expanduser()
        if folder.is_dir():
            return folder
        is_file = folder.is_file()
    except (OSError, RuntimeError) as error:  # a name that is too long, the home of an unknown user
        raise CheckpointError(f"{name!r} cannot be looked up ({error}): check the path") from error
    if is_file:
        raise CheckpointError(f"{name} is a file: give the folder that holds it")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CheckpointError(f"there is no folder {name}: check the path, or give the id of a model on the hub")
    return None


def _snapshot(name: str, *, local_files_only: bool) -> Path | None:
    """The folder of a hub id in the local cache, downloaded unless `local_files_only`."""
    # Imported here because it takes a quarter of a second, and local folders do not need it.
    from huggingface_hub import constants, snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=list(_HUB_ALLOWED),
                ignore_patterns=list(_HUB_IGNORED),
                local_files_only=local_files_only,
            )
        )
    except HFValidationError as error:
        raise CheckpointError(f"{name!r} is neither a folder nor a valid hub id (owner/model): check it") from error
    except Exception as error:  # of the HTTP library under the hub client, which differs by version
        if local_files_only and isinstance(error, LocalEntryNotFoundError):
            return None
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            raise CheckpointError(
                f"{name!r} cannot be kept in {constants.HF_HUB_CACHE}: {error.strerror}; make room there, or name "
                "another folder for models of the hub by HF_HOME"
            ) from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{name!r} is no local folder, and the hub does not give a model of that name ({reason}): check the "
            "spelling and the network, set HF_TOKEN if the model is gated, or give the path of a local folder"
        ) from error


def _add(digest: "hashlib._Hash", *parts: bytes) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
