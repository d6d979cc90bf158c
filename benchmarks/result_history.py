"""A result file that remembers: the newest figures, and a short form of those of earlier commits.

Parts that are measured one after another at one commit stand beside each other. Knows no benchmark.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import circumstances, write_result

Figures = dict[str, Any]


def write_with_history(
    output: Path, benchmark: str, figures: Figures, parts: Mapping[str, Any], summary: Callable[[Figures], Figures]
) -> None:
    """Writes `parts` over those of the same names, if the file is of this commit; else what is there becomes history.

    `summary` is given all of an earlier result and says what is kept of it.
    """
    earlier: Figures = json.loads(output.read_text()) if output.exists() else {}
    history: list[Figures] = earlier.pop("history", [])
    kept: Figures = {}
    if earlier.get("commit") == circumstances()["commit"]:
        kept = earlier.get("parts", {})
    elif earlier:
        history.append({"commit": earlier.get("commit"), "machine": earlier.get("machine"), **summary(earlier)})
    write_result(output, benchmark, {**figures, "parts": {**kept, **parts}, "history": history})
