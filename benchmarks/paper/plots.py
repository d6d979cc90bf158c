"""The plots of the figures, from their rows: what the paper shows is dashed or hollow, what we have is solid."""

from benchmarks.lengths import read_histograms
from benchmarks.paper.capacity import BOUND_S
from benchmarks.paper.charts import Axis, Bars, Series, bar_chart, line_chart, linear_axis
from benchmarks.paper.jobs import Row
from benchmarks.paper.published import BLOCK_SIZES, FIG12, NAMES, SYSTEMS
from benchmarks.paper.verdicts import Figures, fig2_reading

LATENCY = Axis(label="normalised latency, s/token", ticks=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30), is_log=True)
SIZES = Axis(label="block size, tokens", ticks=BLOCK_SIZES, is_log=True)
PARTS = ("token states", "reservation", "internal fragmentation", "external and other")


def plots(figures: Figures) -> dict[str, str]:
    """Plots by file name without its ending."""
    made: dict[str, str] = {}
    if rows := figures.get("fig1"):
        made["fig1"] = _fig1(rows[0])
    for row in figures.get("fig11", []):
        made[f"fig11_{row['dataset']}"] = _fig11(row)
    if rows := figures.get("fig2"):
        for reading in dict.fromkeys(fig2_reading(row) for row in rows):
            name = f"fig2_{len([each for each in made if each.startswith('fig2_')]) + 1}"
            made[name] = _fig2(reading, [row for row in rows if fig2_reading(row) == reading])
    for model, dataset in FIG12:
        own = [row for row in figures.get("fig12", []) if (row["model"], row["dataset"]) == (model, dataset)]
        if own:
            made[f"fig12_{model}_{dataset}"] = _fig12(f"{model}, {dataset}", own)
    for dataset in dict.fromkeys(row["dataset"] for row in figures.get("fig13", [])):
        own = [row for row in figures["fig13"] if row["dataset"] == dataset]
        made[f"fig13_{dataset}"] = _by_system(f"Fig. 13: batched requests, {dataset}", "requests", "batch", own)
    if rows := figures.get("fig14"):
        made["fig14"] = _pairs("Fig. 14: rate at 0.5 s/token, Alpaca", rows, ("sharing", "width"))
    if rows := figures.get("fig15"):
        made["fig15"] = _fig15(rows)
    if rows := figures.get("fig16"):
        for lengths in dict.fromkeys(row["lengths"] for row in rows):
            own = [row for row in rows if row["lengths"] == lengths]
            name = "fig16_" + "_".join(part for part in lengths.replace(",", "").split() if part.isdigit())
            made[name] = _pairs(f"Fig. 16: rate at 0.5 s/token, {lengths}", own, ("prefix",))
    if rows := figures.get("fig17"):
        for index, chats in enumerate(dict.fromkeys(row["conversations"] for row in rows), start=1):
            own = [row for row in rows if row["conversations"] == chats]
            made[f"fig17_{index}"] = _by_system(f"Fig. 17: rate at 0.5 s/token, {chats}", "requests/s", "capacity", own)
    for row in figures.get("fig18b", []):
        made[f"fig18b_{row['dataset']}"] = _fig18b(row)
    if rows := figures.get("fig19a"):
        made["fig19a"] = _fig19a(rows)
    for row in figures.get("fig19b", []):
        made["fig19b"] = _fig19b(row)
    return made


def _fig1(row: Row) -> str:
    points = row["throughput"]
    ours = [(each["batch"], each["tokens_per_s"]) for each in points]
    paper = [(each["batch"], each["paper"]) for each in points]
    series = [
        Series(name="cost model", points=ours),
        Series(name="paper", points=paper, colour=1, is_paper=True, has_line=False),
    ]
    axes = linear_axis("requests in the batch", 40), linear_axis("tokens a second", 1000)
    return line_chart("Fig. 1: throughput by batch size, OPT-13B", *axes, series)


def _fig11(row: Row) -> str:
    """The share of each length."""
    series = []
    for index, (name, histogram) in enumerate(zip(("input", "output"), read_histograms(row["dataset"]), strict=True)):
        shares = [(part / 100, histogram.quantile(part / 100)) for part in range(100)]
        points = [(length, part) for part, length in shares]
        series.append(Series(name=f"{name}, mean {row[name]:g}", points=points, colour=index))
    highest = max(length for each in series for length, _ in each.points)
    axes = linear_axis("tokens", highest), linear_axis("share that is shorter", 1.0)
    return line_chart(f"Fig. 11: lengths, {row['dataset']}", *axes, series)


def _fig2(reading: str, rows: list[Row]) -> str:
    bars: list[Bars] = []
    for index, part in enumerate(PARTS):
        bars.append(Bars(part, [row["use"][index] for row in rows], index))
        bars.append(Bars("the same, paper", [row["paper"][index] for row in rows], index, is_paper=True))
    names = [NAMES[row["system"]] for row in rows]
    return bar_chart(f"Fig. 2: KV memory, {reading}", linear_axis("percent of the slots", 100), names, bars)


def _fig12(panel: str, rows: list[Row]) -> str:
    series = []
    for row in rows:
        if row["cost_factor"] != 1:
            continue
        colour = SYSTEMS.index(row["system"])
        name = NAMES[row["system"]]
        series.append(Series(name=name, points=row["points"], colour=colour))
        paper = [(row["paper"], BOUND_S)]
        series.append(Series(name="paper, at 0.5 s", points=paper, colour=colour, is_paper=True, has_line=False))
    highest = max(x for each in series for x, _ in each.points)
    return line_chart(f"Fig. 12: {panel}", linear_axis("requests a second", highest), LATENCY, series)


def _by_system(title: str, label: str, key: str, rows: list[Row]) -> str:
    """Bars of the rows with the plain costs, and the other reading's beside them."""
    plain = [row for row in rows if row.get("cost_factor", 1) == 1]
    bars: list[Bars] = [Bars("ours", [row[key] for row in plain])]
    others = [row for row in rows if row.get("cost_factor", 1) != 1]
    if others:
        bars.append(Bars(f"ours, costs × {others[0]['cost_factor']}", [row[key] for row in others], 3))
    bars.append(Bars("paper", [row["paper"] for row in plain], 1, is_paper=True))
    highest = max(value for each in bars for value in each.values if value is not None)
    return bar_chart(title, linear_axis(label, highest), [NAMES[row["system"]] for row in plain], bars)


def _pairs(title: str, rows: list[Row], keys: tuple[str, ...]) -> str:
    """Orca (Oracle) and Quire side by side, for each of what the keys name."""
    groups = list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))
    bars: list[Bars] = []
    for colour, system in enumerate(("quire", "oracle")):
        own = {tuple(row[key] for key in keys): row for row in rows if row["system"] == system}
        name = NAMES["quire" if system == "quire" else "oracle"]
        bars.append(Bars(name, [own[group]["capacity"] for group in groups], colour))
        bars.append(Bars(f"{name}, paper", [own[group]["paper"] for group in groups], colour, is_paper=True))
    highest = max(value for each in bars for value in each.values if value is not None)
    names = [" ".join(str(part) for part in group) for group in groups]
    return bar_chart(title, linear_axis("requests a second", highest), names, bars)


def _fig15(rows: list[Row]) -> str:
    """Draw the main readings: lengths paired as in the data, and the surer beams."""
    first: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        first.setdefault((row["sharing"], row["dataset"], row["width"]), row)
    names = [f"{sharing[0]} {dataset[0]} {width}" for sharing, dataset, width in first]
    bars = [
        Bars("ours", [row["saving"] for row in first.values()]),
        Bars("paper", [row["paper"] for row in first.values()], 1, is_paper=True),
    ]
    title = "Fig. 15: blocks saved; parallel or beam, Alpaca or ShareGPT, width"
    return bar_chart(title, linear_axis("percent", 80), names, bars)


def _fig18b(row: Row) -> str:
    ours = [(each["block_size"], each["latency_s"]) for each in row["sizes"]]
    paper = [(each["block_size"], each["paper"]) for each in row["sizes"]]
    series = [Series(name="ours", points=ours), Series(name="paper", points=paper, colour=1, is_paper=True)]
    return line_chart(f"Fig. 18b: latency by block size, {row['dataset']}", SIZES, LATENCY, series)


def _fig19a(rows: list[Row]) -> str:
    series = []
    for colour, way in enumerate(("swap", "recompute")):
        ours = [(row["block_size"], row[f"{way}_ms"]) for row in rows]
        paper = [(row["block_size"], row[f"paper_{way}_ms"]) for row in rows]
        series.append(Series(name=f"{way}, ours", points=ours, colour=colour))
        series.append(Series(name=f"{way}, paper", points=paper, colour=colour, is_paper=True, has_line=False))
    return line_chart("Fig. 19a: a sequence of 256 tokens", SIZES, linear_axis("ms", 140), series)


def _fig19b(row: Row) -> str:
    series = []
    for colour, way in enumerate(("swap", "recompute")):
        ours = [(each["block_size"], each[f"{way}_s"]) for each in row["sizes"]]
        paper = [(each["block_size"], each[f"paper_{way}_s"]) for each in row["sizes"]]
        series.append(Series(name=f"{way}, ours", points=ours, colour=colour))
        series.append(Series(name=f"{way}, paper", points=paper, colour=colour, is_paper=True))
    sizes = Axis(label=SIZES.label, ticks=(16, 32, 64, 128, 256), is_log=True)
    return line_chart("Fig. 19b: swapping or computing again, ShareGPT", sizes, LATENCY, series)
