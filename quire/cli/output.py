"""What commands share in speaking to a person: consoles, and errors as one line and an exit code.

Exit codes: 1 it did not work, 2 it was asked wrongly, 130 interrupted.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console

import quire
from quire.cli.flags import in_flags, with_flags

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

out = Console(highlight=False)
err = Console(stderr=True, highlight=False, soft_wrap=True)

_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), 127) if chr(code) not in "\n\t"}


@contextmanager
def errors_explained(if_not_found: str = "") -> Iterator[None]:
    """Turns what can go wrong into one line on standard error and an exit code.

    `if_not_found` says which command lists what there is.
    """
    try:
        yield
    except quire.NotFoundError as error:
        fail("; ".join(filter(None, (with_flags(error.message), if_not_found))))
    except quire.InvalidRequestError as error:
        fail(explained(error), EXIT_USAGE)
    except quire.OverloadedError as error:
        fail(f"{explained(error)} (the server suggests {error.retry_after_s:g} s)")
    except quire.QuireError as error:
        fail(explained(error))
    except ValueError as error:
        fail(with_flags(str(error)), EXIT_USAGE)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def explained(error: "quire.QuireError") -> str:
    """What went wrong, by the flags of the command that runs."""
    return in_flags(error) if isinstance(error, quire.InvalidRequestError) else with_flags(error.message)


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Ends the command with one line."""
    err.print(f"quire: {message}", markup=False)
    raise typer.Exit(code)


def write_stream(stream: "quire.Stream", on_output: Callable[[], None] = lambda: None) -> None:
    """Writes a text as it comes, and ends its line however it ends. `on_output` is called before each piece."""
    is_begun = False
    try:
        for chunk in stream:
            is_begun = True
            on_output()
            write_text(chunk.text)
    finally:
        if is_begun:
            write_text("\n")


def write_samples(stream: "quire.Stream", on_output: Callable[[], None] = lambda: None) -> None:
    """Writes several texts, each under a heading when it has ended. `on_output` is called at each piece that comes."""
    texts: dict[int, str] = {}
    for chunk in stream:
        on_output()
        texts[chunk.index] = texts.get(chunk.index, "") + chunk.text
        if chunk.finish is not None:
            out.print(f"[bold]{heading(chunk.index, chunk.finish)}[/bold]")
            write_text(texts[chunk.index] + "\n")


def heading(index: int, finish: "quire.Finish") -> str:
    """What is said above one of several outputs."""
    score = "" if finish.score is None else f", score {finish.score:.4f}"
    return f"--- sample {index}{score}, {finish.reason.value}"


def write_text(text: str) -> None:
    """Writes a model's text as it is, except that it cannot steer a terminal."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()
