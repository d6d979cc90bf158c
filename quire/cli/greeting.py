"""Lines of the greeting of `quire serve`: what callers need, and a first command that works with this model.

Knows the settings and the model, no process.
"""

import os
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from quire.access_settings import AccessSettings
from quire.access_variables import API_KEY, TLS_ROOT, TLS_SERVER_NAME
from quire.params import DEFAULT_ADDRESS
from quire.results import Model

NO_TOKENIZER = "the model has no tokenizer.json, so prompts are token ids and outputs too; for texts add that file"


def access_lines(access: AccessSettings) -> list[tuple[str, str]]:
    """Lines on what a caller needs besides the address."""
    lines = []
    if os.environ.get(API_KEY):
        source = "" if access.api_key_file is None else f", such as one of {access.api_key_file}"
        lines.append(("keys", f"callers send an API key{source}: commands by {API_KEY}, HTTP by Authorization: Bearer"))
    if access.tls_cert is not None:
        lines.append(("tls", f"callers of gRPC set {TLS_ROOT}, and {TLS_SERVER_NAME} for another name"))
    return lines


def first_lines(model: Model, address: str, access: AccessSettings) -> list[tuple[str, str]]:
    """Lines on a first command, which works as it stands but for the key, and on why it is no text."""
    there = "" if address == DEFAULT_ADDRESS else f" --address {shlex.quote(address)}"
    command = f"{_variables(access)}{_program()}"
    if model.has_tokenizer:
        return [("try", f"{command} generate{there} 'Once upon a time'")]
    return [("warning", NO_TOKENIZER), ("try", f"{command} bench{there} --num-requests 8")]


def thread_warnings(num_threads: int | None, num_available: int) -> list[str]:
    """A warning if a worker was given more threads than there are processors; [] otherwise."""
    if num_threads is None or num_threads <= num_available:
        return []
    return [f"--threads {num_threads} is more than the {num_available} processors here: steps are slower"]


def sampling_defaults(model: Model) -> list[str]:
    """The model's values of sampling parameters that a request leaves out; [] if it has none."""
    said = {name: value for name, value in asdict(model.sampling_defaults).items() if value is not None}
    if not said:
        return []
    values = ", ".join(f"{name} {value:g}" for name, value in said.items())
    return [f"{values} unless a request sets them (--generation-config none: Quire's defaults)"]


def _variables(access: AccessSettings) -> str:
    """Variables that a command of another terminal needs, as they are written before it; no secret."""
    given = {API_KEY: "KEY"} if os.environ.get(API_KEY) else {}
    if access.tls_cert is not None:  # then they are set as for our own services
        given |= {name: shlex.quote(os.environ[name]) for name in (TLS_ROOT, TLS_SERVER_NAME) if name in os.environ}
    return "".join(f"{name}={value} " for name, value in given.items())


def _program() -> str:
    """The command to type for this program: its name, or its path where the name is none or another one's."""
    path = Path(sys.argv[0])
    found = shutil.which("quire")
    is_named = path.name != "quire" or (found is not None and Path(found).resolve() == path.resolve())
    return "quire" if is_named else shlex.quote(str(path))
