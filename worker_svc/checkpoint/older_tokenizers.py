"""Converts older vocabulary files, such as sentencepiece's tokenizer.model, into a tokenizer.json.

The conversion runs in a process of its own: its native libraries conflict with those of the worker, and a file that
crashes them must end in an error message.

    python -m worker_svc.checkpoint.older_tokenizers FOLDER    # writes tokenizer.json to standard output
"""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from worker_svc.checkpoint.checkpoint_error import CheckpointError

_MOST_S = 300.0  # a conversion takes seconds
_MOST_SHOWN = 300


def convert_tokenizer(folder: Path) -> bytes:
    """The tokenizer.json that `transformers` makes of the folder's files. Raises CheckpointError if it cannot."""
    command = [sys.executable, "-P", "-m", __name__, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_MOST_S, check=False)
    except subprocess.TimeoutExpired:
        raise _refusal(folder, f"it takes more than {_MOST_S:g} s") from None
    if done.returncode != 0 or not done.stdout:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise _refusal(folder, lines[-1][:_MOST_SHOWN] if lines else f"exit code {done.returncode}")
    return done.stdout


def main() -> None:
    """Entry point of the process that converts."""
    # Imported here because it loads torch, and importers of this module must not.
    from transformers import AutoTokenizer  # noqa: PLC0415

    # transformers reads sentencepiece's files as protobuf messages and never calls the sentencepiece library, but
    # requires it; where it is installed, loading it beside torch crashes.
    conversion: Any = import_module("transformers.convert_slow_tokenizer")
    conversion.requires_backends = lambda *_: None
    conversion.is_sentencepiece_available = lambda: False
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True, trust_remote_code=False)
    sys.stdout.buffer.write(tokenizer.backend_tokenizer.to_str().encode())
    sys.stdout.flush()
    os._exit(0)  # the native libraries may crash at a normal exit


def _refusal(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the tokenizer in {folder} cannot be converted to tokenizer.json ({reason}): "
        "add a tokenizer.json to the folder"
    )


if __name__ == "__main__":
    main()
