"""Plots of a fleet's figures, from their rows."""

from collections.abc import Sequence

from benchmarks.fleet.fleet_jobs import RACK_FAILS_S
from benchmarks.paper.charts import Axis, Series, line_chart, linear_axis
from benchmarks.paper.jobs import Row

Figures = dict[str, list[Row]]

_SECONDS = Axis(label="time to first token, s", ticks=(0.01, 0.03, 0.1, 0.3, 1, 3, 10), is_log=True)


def plots(figures: Figures) -> dict[str, str]:
    """Plots by file name without its ending."""
    shards = figures["shards"]
    made = {
        "shards_rate": _shards_rate(shards),
        "shards_first_token": _shards_first_token(shards),
        "workers_of_a_scheduler": _saturation(figures["saturation"]),
        "gateways": _gateways(figures["gateways"]),
    }
    return made | {f"rack_{row['num_workers']}": _rack(row) for row in figures["rack"]}


def kinds_of(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Kinds of workers and live requests on each, in the order of the rows."""
    return list(dict.fromkeys((row["worker"], row["rows"]) for row in rows))


def _shards_rate(rows: Sequence[Row]) -> str:
    points = [(row["num_shards"], row["tokens_per_s"] / 1e3) for row in rows]
    axes = (
        linear_axis("shards", max(x for x, _ in points)),
        linear_axis("thousand tokens/s", max(y for _, y in points)),
    )
    title = f"{rows[0]['num_workers']} workers, {rows[0]['num_clients']:,} live requests"
    return line_chart(title, *axes, [Series(name="tokens to clients", points=points)])


def _shards_first_token(rows: Sequence[Row]) -> str:
    series = [
        Series(name=name, points=[(row["num_shards"], row[key]) for row in rows], colour=colour)
        for colour, (name, key) in enumerate((("p50", "ttft_p50_s"), ("p99", "ttft_p99_s")))
    ]
    title = f"{rows[0]['num_workers']} workers, {rows[0]['num_clients']:,} live requests"
    return line_chart(title, linear_axis("shards", max(row["num_shards"] for row in rows)), _SECONDS, series)


def _saturation(rows: Sequence[Row]) -> str:
    series = []
    for colour, (worker, batch) in enumerate(kinds_of(rows)):
        own = [row for row in rows if (row["worker"], row["rows"]) == (worker, batch)]
        points = [(row["num_workers"], row["tokens_per_s"] / 1e3) for row in own]
        series.append(Series(name=f"{worker}, {batch} live", points=points, colour=colour))
    axes = (
        linear_axis("workers of one scheduler", max(row["num_workers"] for row in rows)),
        linear_axis("thousand tokens/s", max(row["tokens_per_s"] for row in rows) / 1e3),
    )
    return line_chart("One scheduler", *axes, series)


def _gateways(rows: Sequence[Row]) -> str:
    points = [(row["num_gateways"], row["tokens_per_s"] / 1e3) for row in rows]
    axes = (
        linear_axis("gateways", max(x for x, _ in points)),
        linear_axis("thousand tokens/s", max(y for _, y in points)),
    )
    title = f"{rows[0]['num_workers']} workers, {rows[0]['num_shards']} shards"
    return line_chart(title, *axes, [Series(name="tokens to clients", points=points)])


def _rack(row: Row) -> str:
    points = [(moment_s, rate / 1e3) for moment_s, rate in row["rates"]]
    axes = (
        linear_axis("s", max(x for x, _ in points)),
        linear_axis("thousand tokens/s", max(y for _, y in points)),
    )
    title = f"A rack is lost after {RACK_FAILS_S:g} s: {row['num_workers']:,} workers, {row['num_shards']} shards"
    return line_chart(title, *axes, [Series(name="tokens to clients", points=points)])
