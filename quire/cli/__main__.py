"""Entry point of the console script `quire`. Without the extra `cli` it says how to install it."""

import io
import os
import signal
import sys

from quire.install import install_hint
from quire.redaction import has_password
from quire.variables import HIDDEN_URL

EXTRA = ("typer", "rich", "pydantic", "pydantic_settings", "structlog")


def main() -> None:
    """Runs the command line. Ctrl-C raises KeyboardInterrupt once all is loaded; before that it ends the process."""
    _hide_password()
    _open_missing_streams()
    _take_any_text()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its messages on connections are of no use to a user
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing runs yet that needs cleaning up
    try:
        from quire.cli.app import run  # noqa: PLC0415 - the extra may be missing
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        sys.stderr.write(f"quire: the command line needs {error.name}; run {install_hint('cli')}\n")
        raise SystemExit(1) from None
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _open_missing_streams() -> None:
    """Replaces closed standard streams by the null device: else a socket would get their descriptor."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - open as long as the process lives
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _take_any_text() -> None:
    """Makes standard streams take any text: what is no UTF-8 is refused as a prompt, what cannot be shown is replaced.

    The locale may say otherwise, and then reading and writing would raise.
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _hide_password() -> None:
    """Starts the process again with a URL that has a password in a variable: everybody can read arguments."""
    words = sys.orig_argv[1:]
    if sys.argv[1:2] != ["serve"] or _value(words, "--store")[0] not in ("", "auto"):
        return
    url, rest = _value(words, "--redis-url")
    if has_password(url):
        os.execve(sys.executable, [sys.executable, *rest], {**os.environ, HIDDEN_URL: url})


def _value(words: list[str], flag: str) -> tuple[str, list[str]]:
    """The value of a flag, "" if it was not given, and the words without it."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == flag:
            end = index + (1 if equals else 2)
            return value if equals else "".join(words[index + 1 : end]), words[:index] + words[end:]
    return "", words


if __name__ == "__main__":
    main()
