"""Turns older vocabulary files, sentencepiece's tokenizer.model among them, into a tokenizer.json.

It is done in a process of its own: what converts them has native parts, which do not get on with those that are loaded
here, and a file that makes them crash must end in words.

    python -m worker_svc.checkpoint.older_tokenizers FOLDER    # writes tokenizer.json to standard output
"""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from worker_svc.checkpoint.checkpoint_error import CheckpointError

_MOST_S = 300.0  # it takes seconds
_MOST_SHOWN = 300


def convert_tokenizer(folder: Path) -> bytes:
    """As `transformers` converts them. Raises CheckpointError if it cannot."""
    command = [sys.executable, "-P", "-m", __name__, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_MOST_S, check=False)
    except subprocess.TimeoutExpired:
        raise _refusal(folder, f"it takes more than {_MOST_S:g} s") from None
    if done.returncode != 0 or not done.stdout:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise _refusal(folder, said[-1][:_MOST_SHOWN] if said else f"exit code {done.returncode}")
    return done.stdout


def main() -> None:
    """Entry point of the process that converts."""
    # Here, because it loads torch; this module is imported by what must not.
    from transformers import AutoTokenizer  # noqa: PLC0415

    # It reads sentencepiece's files as protobuf messages, and calls nothing of the sentencepiece library, yet asks for
    # it; where that is installed, loading it beside torch crashes.
    conversion: Any = import_module("transformers.convert_slow_tokenizer")
    conversion.requires_backends = lambda *_: None
    conversion.is_sentencepiece_available = lambda: False
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True, trust_remote_code=False)
    sys.stdout.buffer.write(tokenizer.backend_tokenizer.to_str().encode())
    sys.stdout.flush()
    os._exit(0)  # the native parts may crash at the usual end


def _refusal(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the tokenizer in {folder} cannot be converted to tokenizer.json ({reason}): "
        "add a tokenizer.json to the folder"
    )


if __name__ == "__main__":
    main()
