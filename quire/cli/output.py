"""Output that commands share: consoles, and errors as one line and an exit code.

Exit codes: 1 failure, 2 wrong usage, 130 interrupted.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

import quire
from quire.cli.flags import in_flags, with_flags

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_REPLACED = dict.fromkeys((*range(32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")  # what controls a terminal
_CONTROLS = {code: shown for code, shown in _REPLACED.items() if chr(code) not in "\n\t"}


class _SafeConsole(Console):
    """A console on which only our own styles control a terminal, whoever has written the text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, with characters that control a terminal replaced."""
        for segment in super().render(renderable, options):
            is_text = self.is_terminal and not segment.control
            yield segment._replace(text=segment.text.translate(_CONTROLS)) if is_text else segment


out = _SafeConsole(highlight=False)
err = _SafeConsole(stderr=True, highlight=False, soft_wrap=True)

_LONGEST_LINE = 100_000  # off a terminal
_OTHER_COLUMNS = 16  # room that names leave for them on a terminal


@contextmanager
def errors_explained(if_not_found: str = "") -> Iterator[None]:
    """Turns errors into one line on standard error and an exit code.

    `if_not_found`: hint for NotFoundError, naming the command that lists what exists.
    """
    try:
        yield
    except quire.NotFoundError as error:
        fail("; ".join(filter(None, (with_flags(error.message), if_not_found))))
    except quire.InvalidRequestError as error:
        fail(error_text(error), EXIT_USAGE)
    except quire.OverloadedError as error:
        fail(f"{error_text(error)}; try again in {error.retry_after_s:g} s")
    except quire.QuireError as error:
        fail(error_text(error))
    except ValueError as error:
        fail(with_flags(str(error)), EXIT_USAGE)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def error_text(error: "quire.QuireError") -> str:
    """The message of an error, with flags of the running command."""
    return in_flags(error) if isinstance(error, quire.InvalidRequestError) else with_flags(error.message)


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Ends the command with one line."""
    err.print(f"quire: {message}", markup=False)
    raise typer.Exit(code)


def print_listing(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, a row in a line. The first column has names to type, never cut; off a terminal nothing is.

    Columns without content are left out. A name that would leave no room for others goes on in the next line.
    """
    shown = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for index in shown:
        is_name = index == 0
        width = _name_width(max(cell_len(row[index]) for row in rows)) if is_name else None
        table.add_column(columns[index], min_width=width, overflow="fold" if is_name else "ellipsis")
    for row in rows:
        table.add_row(*(escape(row[index].translate(_REPLACED)) for index in shown))
    (out if out.file.isatty() else Console(width=_LONGEST_LINE)).print(table, highlight=False)


def _name_width(longest: int) -> int:
    """Width of a column of names, so long at the most, on a terminal."""
    return longest if longest <= out.width - _OTHER_COLUMNS else out.width // 2


def write_stream(stream: "quire.Stream", on_output: Callable[[], None] = lambda: None) -> None:
    """Writes a text as it streams, and always ends its last line. `on_output` is called before each piece."""
    is_begun = False
    try:
        for chunk in stream:
            is_begun = True
            on_output()
            write_text(chunk.text)
    finally:
        if is_begun:
            write_text("\n")


def write_answer(stream: "quire.Stream", on_output: Callable[[], None] = lambda: None) -> None:
    """Writes a parsed answer as it streams, and ends its last line: reasoning on standard error, then content, then
    each call on a line of its own. `on_output` is called before each piece.
    """
    has_begun = False
    try:
        for each in (delta for chunk in stream for delta in chunk.deltas):
            on_output()
            match each:
                case quire.ReasoningDelta(text):
                    err.print(text, end="", style="dim", markup=False)
                    continue
                case quire.ContentDelta(text) | quire.ArgumentsDelta(_, text):
                    write_text(text)
                case quire.ToolCallBegun(_, _, name):
                    write_text(f"\n{name} " if has_begun else f"{name} ")
            has_begun = True
    finally:
        if has_begun:
            write_text("\n")


def write_samples(stream: "quire.Stream", on_output: Callable[[], None] = lambda: None) -> None:
    """Writes several texts, each under a heading when it has ended. `on_output` is called at each piece."""
    texts: dict[int, str] = {}
    for chunk in stream:
        on_output()
        texts[chunk.index] = texts.get(chunk.index, "") + chunk.text
        if chunk.finish is not None:
            out.print(f"[bold]{heading(chunk.index, chunk.finish)}[/bold]")
            write_text(texts[chunk.index] + "\n")


def heading(index: int, finish: "quire.Finish") -> str:
    """Heading of one of several outputs."""
    score = "" if finish.score is None else f", score {finish.score:.4f}"
    return f"--- sample {index}{score}, {finish.reason.value}"


def json_line(value: object) -> str:
    """A line of JSON that standard output can take: of another encoding than UTF-8 with its letters escaped."""
    is_utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
    return json.dumps(value, default=_plain, ensure_ascii=not is_utf8) + "\n"


def _plain(value: object) -> Any:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} has no JSON form")


def write_text(text: str) -> None:
    """Writes a model's text without characters that control a terminal."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()
