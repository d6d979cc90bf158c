"""The tables of the page that are not verdicts: rates, memory, block sizes, as Markdown."""

from collections.abc import Iterator, Sequence

from benchmarks.paper.jobs import Row
from benchmarks.paper.published import NAMES
from benchmarks.paper.verdicts import Figures
from benchmarks.report import markdown_table

KEYS = {"fig14": ("sharing", "width"), "fig16": ("prefix", "lengths"), "fig17": ("conversations",)}


def tables(figure: str, figures: Figures) -> Iterator[str]:
    """Tables of one section of the page; none if its figure is missing."""
    rows = figures.get(figure, [])
    if figure == "fig1":
        yield from _table1(figures.get("table1", []))
        for row in rows:
            yield from _fig1(row)
    elif figure == "fig2" and rows:
        yield from _fig2(rows)
    elif figure == "fig11" and rows:
        yield from _fig11(rows)
    elif figure == "fig12" and rows:
        yield from _fig12(rows)
    elif figure in KEYS and rows:
        yield from _rates(rows, KEYS[figure])
    elif figure == "fig18b":
        for row in rows:
            yield from _fig18b(row)
    elif figure == "fig19":
        for row in figures.get("fig19b", []):
            yield from _fig19b(row)


def _table1(rows: list[Row]) -> Iterator[str]:
    if rows:
        head = ("model", "GPUs", "parameters, GB", "KV memory, GB", "bytes a token", "slots, paper", "slots, ours")
        keys = ("model", "gpus", "weights_gb", "kv_gb", "bytes_per_token", "paper", "slots")
        yield from markdown_table(head, [[_number(row[key]) for key in keys] for row in rows])


def _fig1(row: Row) -> Iterator[str]:
    yield f"The cost model is at most {row['largest_residual_ms']} ms a step from the points of Fig. 1.\n"
    head = ("", "GB a request, paper", "ours", "requests that fit, paper", "ours")
    keys = ("paper_gb_per_request", "gb_per_request", "paper_requests", "requests")
    yield from markdown_table(head, [[name, *(each[key] for key in keys)] for name, each in row["memory"].items()])


def _fig2(rows: list[Row]) -> Iterator[str]:
    yield "Percent of the slots, the paper's in brackets.\n"
    head = ("requests/s, costs", "system", "token states", "reservation", "internal", "external and other")
    cells = []
    for row in rows:
        pairs = [f"{ours:.1f} ({paper:g})" for ours, paper in zip(row["use"], row["paper"], strict=True)]
        cells.append([f"{row['rate']:g}, × {row['cost_factor']:g}", NAMES[row["system"]], *pairs])
    yield from markdown_table(head, cells)


def _fig11(rows: list[Row]) -> Iterator[str]:
    keys = ("dataset", "paper_input", "input", "paper_output", "output")
    head = ("", "mean input, paper", "ours", "mean output, paper", "ours")
    yield from markdown_table(head, [[row[key] for key in keys] for row in rows])


def _fig12(rows: list[Row]) -> Iterator[str]:
    head = ("panel", "costs", "system", "requests/s, paper", "ours", "difference", "in half the time")
    cells = []
    for row in rows:
        difference = f"{100 * (row['capacity'] / row['paper'] - 1):+.0f} %"
        half = f"{row['rate_in_half']:.3g}" if "rate_in_half" in row else ""
        own = [f"{row['model']}, {row['dataset']}", f"× {row['cost_factor']:g}", NAMES[row["system"]]]
        cells.append([*own, row["paper"], f"{row['capacity']:.3g}", difference, half])
    yield from markdown_table(head, cells)


def _rates(rows: list[Row], keys: Sequence[str]) -> Iterator[str]:
    cells = []
    for row in rows:
        what = ", ".join(str(row[key]) for key in keys)
        cells.append([what, NAMES[row["system"]], row["paper"] or "", f"{row['capacity']:.3g}"])
    yield from markdown_table(("", "system", "requests/s, paper", "ours"), cells)


def _fig18b(row: Row) -> Iterator[str]:
    yield f"{row['dataset']}, {row['rate']:.3g} requests/s: s/token by block size, the paper's in brackets.\n"
    sizes = row["sizes"]
    cells = [f"{each['latency_s']:.3g} ({each['paper']:g})" for each in sizes]
    yield from markdown_table([each["block_size"] for each in sizes], [cells])


def _fig19b(row: Row) -> Iterator[str]:
    yield f"Fig. 19b at {row['rate']:.3g} requests/s: s/token by block size, the paper's in brackets.\n"
    cells = [
        [way, *(f"{each[f'{way}_s']:.3g} ({each[f'paper_{way}_s']:g})" for each in row["sizes"])]
        for way in ("recompute", "swap")
    ]
    yield from markdown_table(["", *(each["block_size"] for each in row["sizes"])], cells)


def _number(value: object) -> object:
    return f"{value:,}" if isinstance(value, int) else value
