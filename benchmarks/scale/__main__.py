"""Growth of costs: of an iteration with running sequences, of memory with queued requests, of a start with the journal.

Real processes, the journal on the embedded Valkey, a worker that only simulates execution. Prints tables and fitted
exponents, writes JSON and a plot for each part; parts that are measured one after another are kept beside each other.

    python -m benchmarks.scale [--parts iteration memory start] [--batches N ...] [--queued N ...] [--journaled N ...]
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.durability.recovery_time import measure as measure_recovery
from benchmarks.report import RESULTS, table
from benchmarks.result_history import write_with_history
from benchmarks.scale.growth import exponent_of
from benchmarks.scale.iteration_scale import measure_iterations
from benchmarks.scale.memory_scale import measure_memory
from benchmarks.svg_chart import Line, log_log_chart

JOURNALED_PROMPT = 128
JOURNALED_OUTPUT = 100  # tokens of each request
PARTS = ("iteration", "memory", "start")

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Plot of one part: `by` is the column along x; an exponent is fitted to each of `costs`."""

    title: str
    x_label: str
    y_label: str
    by: str
    costs: dict[str, str]  # names of columns, and of their lines

    def points(self, rows: Rows, cost: str) -> list[tuple[float, float]]:
        """Points above 0, which have a logarithm."""
        return [(row[self.by], row[cost]) for row in rows if row[cost] > 0]

    def exponents(self, rows: Rows) -> dict[str, float]:
        return {cost: round(exponent_of(self.points(rows, cost)), 3) for cost in self.costs}

    def drawn(self, rows: Rows) -> str:
        """Lines to draw, with a linear one through the last point of the first cost."""
        lines = [Line(name, self.points(rows, cost)) for cost, name in self.costs.items()]
        (first_x, _), (last_x, last_y) = lines[0].points[0], lines[0].points[-1]
        lines.append(Line("linear", [(first_x, last_y * first_x / last_x), (last_x, last_y)], is_dashed=True))
        return log_log_chart(self.title, self.x_label, self.y_label, lines)


PLOTS = {
    "iteration": Plot(
        title="Cost of an iteration",
        x_label="running sequences",
        y_label="ms",
        by="batch",
        costs={
            "scheduler_cpu_ms": "CPU of the scheduler",
            "idle_at_depth_1_ms": "not hidden, depth 1",
            "idle_at_depth_2_ms": "not hidden, depth 2",
        },
    ),
    "memory": Plot(
        title="Memory of the scheduler",
        x_label="queued requests",
        y_label="MB resident",
        by="queued",
        costs={"beyond_empty_mb": "beyond an empty queue", "resident_mb": "in all"},
    ),
    "start": Plot(
        title="Start-up by what is in the journal",
        x_label="tokens in the journal",
        y_label="s",
        by="journaled_tokens",
        costs={
            "all_rebuilt_s": "all requests rebuilt",
            "journal_read_s": "journal read",
            "first_new_token_s": "process start to first new token",
        },
    ),
}


def scale_iteration(options: argparse.Namespace) -> Rows:
    return [asdict(row) for row in measure_iterations(sorted(options.batches), options.steps)]


def scale_memory(options: argparse.Namespace) -> Rows:
    return [asdict(row) for row in measure_memory(sorted(options.queued))]


def scale_start(options: argparse.Namespace) -> Rows:
    rows = []
    for requests in sorted(options.journaled):
        print(f"start: {requests} live requests in the journal", flush=True)
        figures = measure_recovery(
            argparse.Namespace(
                requests=requests, prompt=JOURNALED_PROMPT, tokens=JOURNALED_OUTPUT, data_dir=options.data_dir
            )
        )
        num_tokens = requests * (JOURNALED_PROMPT + JOURNALED_OUTPUT)
        rows.append({"live_requests": requests, "journaled_tokens": num_tokens, **figures})
    return rows


def report(part: str, rows: Rows) -> dict[str, Any]:
    """Prints a part, and returns what is kept of it."""
    print(table(list(rows[0]), (list(row.values()) for row in rows)))
    exponents = PLOTS[part].exponents(rows)
    for cost, exponent in exponents.items():
        print(f"{cost} grows as {PLOTS[part].by} ** {exponent:.2f}")
    return {"exponents": exponents, "rows": rows}


def summary_of(result: dict[str, Any]) -> dict[str, Any]:
    """Summary that the history keeps of a result: of each part the exponents and the last row."""
    parts = result["parts"].items()
    return {part: {"exponents": each["exponents"], "last": each["rows"][-1]} for part, each in parts}


def main() -> None:
    """Reads the command line and measures."""
    options = parse_arguments()
    measure = {"iteration": scale_iteration, "memory": scale_memory, "start": scale_start}
    parts = {}
    for part in options.parts:
        rows = measure[part](options)
        parts[part] = report(part, rows)
        options.output.with_name(f"scale_{part}.svg").write_text(PLOTS[part].drawn(rows))
    write_with_history(options.output, "scale", {}, parts, summary_of)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Defaults are those of the kept result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64, 256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=60, help="steady steps at each batch")
    parser.add_argument("--queued", type=int, nargs="+", default=[100, 1000, 10_000, 30_000, 100_000])
    parser.add_argument("--journaled", type=int, nargs="+", default=[10, 100, 1000, 10_000], help="live requests")
    parser.add_argument("--data-dir", type=Path, help="where Valkey keeps its file; default: in memory")
    parser.add_argument("--output", type=Path, default=RESULTS / "scale.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
