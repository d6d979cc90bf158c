"""Writes `docs/results.md` from the files in `benchmarks/results`. Measures nothing.

python -m benchmarks.results_page
"""

import sys

from benchmarks.report import RESULTS, ROOT
from benchmarks.results_page.page import page, read_plots, read_results

PAGE = ROOT / "docs" / "results.md"


def main() -> None:
    """Ends with status 1 and a sentence if a result has no section."""
    try:
        text = page(read_results(RESULTS), read_plots(RESULTS))
    except ValueError as error:
        sys.exit(str(error))
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
