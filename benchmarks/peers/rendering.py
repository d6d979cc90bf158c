"""A campaign's figures as people read them: tables, verdicts, plots; and as JSON.

Knows neither how they were measured nor where they are written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.bar_chart import Bar, bar_chart
from benchmarks.peers.figures import Figures, Verdict, num_equal, verdicts
from benchmarks.peers.ours import OURS, OURS_OVER_HTTP, REFERENCE, default_verdicts, is_peer
from benchmarks.peers.runs_file import Run
from benchmarks.peers.systems import CLOSED, PARITY, SYSTEMS, targets_of
from benchmarks.peers.workload import LOADS
from benchmarks.report import table
from benchmarks.svg_chart import Line, log_log_chart

_HEAD = ("", "output tokens/s", "norm. latency, ms", "first token p50 / p99, ms", "per token p50 / p99, ms", "peak MiB")


class Outcome:
    """Outcome of all rounds of a campaign."""

    def __init__(
        self,
        runs: Sequence[Run],
        not_set_up: Mapping[str, str],
        top_p: float | None = None,
        *,
        over_http: bool = False,
        in_chats: bool = False,
    ) -> None:
        """`not_set_up`: reasons, by system. `top_p`: how tokens were drawn; None: greedily."""
        self._runs = runs
        self._targets = targets_of(top_p, over_http=over_http, in_chats=in_chats)
        self._ours = OURS_OVER_HTTP if over_http else OURS
        self._not_set_up = not_set_up

    def medians(self, load: str) -> dict[str, Figures]:
        """Medians of every system that ran the load, in the order of `SYSTEMS`."""
        rounds: dict[str, list[Figures]] = {name: [] for name in SYSTEMS}
        for run in self._runs:
            if run.load == load and run.figures is not None:
                rounds[run.system].append(run.figures)
        return {name: Figures.median_of(figures) for name, figures in rounds.items() if figures}

    def failures(self) -> dict[str, str]:
        """Reasons, by system: it could not be set up, or a run of it failed."""
        failed = {
            run.system: f"round {run.round + 1}, {run.load}: {run.error}" for run in self._runs if run.error is not None
        }
        return {**{name: f"not set up: {reason}" for name, reason in self._not_set_up.items()}, **failed}

    def verdicts(self, load: str) -> list[Verdict]:
        """Compare ours with the best peer."""
        return verdicts(
            [run for run in self._runs if is_peer(run.system)], load, self._ours, self._targets.get(load, {})
        )

    def defaults(self, load: str) -> list[Verdict]:
        """Compare our defaults with our flags, if both ran."""
        return default_verdicts(self._runs, load)

    def parity(self) -> dict[str, dict[str, Any]]:
        """Every system's outputs of the first round against those of the reference, where that ran."""
        outputs = {
            run.system: run.token_ids for run in self._runs if run.load == PARITY and run.round == 0 and run.token_ids
        }
        if REFERENCE not in outputs:
            return {}
        return {name: num_equal(outputs[name], outputs[REFERENCE]) for name in SYSTEMS if name in outputs}

    def as_json(self, loads: Sequence[str]) -> dict[str, Any]:
        """Medians, every run, failures. No verdicts: their rules change, and the page makes them of the runs."""
        return {
            "key_figures": {
                f"{load}_{name}_tokens_per_s": each.tokens_per_s
                for load in loads
                if load in CLOSED
                for name, each in self.medians(load).items()
            },
            "medians": {load: {name: asdict(each) for name, each in self.medians(load).items()} for load in loads},
            "equal_to_transformers": self.parity(),
            "failures": self.failures(),
            "runs": [
                {
                    "round": run.round,
                    "system": run.system,
                    "load": run.load,
                    "figures": asdict(run.figures),
                    **({"commit": run.origin["commit"]} if run.origin is not None else {}),
                }
                for run in self._runs
                if run.figures is not None
            ],
        }

    def as_text(self, loads: Sequence[str]) -> str:
        parts = [part for load in loads if load != PARITY for part in self._load_text(load)]
        if self.parity():
            parts.append("\nOutputs equal to those of transformers, one request at a time:")
            rows = [
                (SYSTEMS[name].title, f"{each['equal']} of {each['requests']} requests", _share(each))
                for name, each in self.parity().items()
                if name != REFERENCE
            ]
            parts.append(table(("", "equal", "tokens before a difference"), rows))
        parts += [f"\n{SYSTEMS[name].title}: {reason}" for name, reason in self.failures().items()]
        return "\n".join(parts)

    def charts(self, title: str, loads: Sequence[str]) -> dict[str, str]:
        """SVG documents by name."""
        documents = {}
        for load in loads:
            medians = self.medians(load)
            if load in CLOSED and medians:
                best = max(each.tokens_per_s for each in medians.values())
                bars = [
                    Bar(f"{each.tokens_per_s:g} tokens/s", SYSTEMS[name].title, each.tokens_per_s / best)
                    for name, each in medians.items()
                ]
                documents[load] = bar_chart(f"{title}, {load}: output tokens/s, of the best", bars)
        lines = self._latency_lines(loads)
        if lines:
            documents["latency"] = log_log_chart(
                f"{title}: normalised latency", "requests/s", "ms a token, mean over requests", lines
            )
        return documents

    def _latency_lines(self, loads: Sequence[str]) -> list[Line]:
        points: dict[str, list[tuple[float, float]]] = {}
        for load in loads:
            rate = LOADS[load].rate
            if rate is not None:
                for name, each in self.medians(load).items():
                    points.setdefault(name, []).append((rate, 1e3 * each.normalised_latency_s))
        return [Line(SYSTEMS[name].title, places) for name, places in points.items()]

    def _load_text(self, load: str) -> list[str]:
        rows = [
            (
                SYSTEMS[name].title,
                each.tokens_per_s,
                f"{1e3 * each.normalised_latency_s:.1f}",
                f"{1e3 * each.first_token_p50_s:.0f} / {1e3 * each.first_token_p99_s:.0f}",
                f"{1e3 * each.per_token_p50_s:.1f} / {1e3 * each.per_token_p99_s:.1f}",
                f"{each.peak_memory_mib:.0f}",
            )
            for name, each in self.medians(load).items()
        ]
        return [
            f"\n{load}:",
            table(_HEAD, rows),
            *(each.sentence for each in [*self.verdicts(load), *self.defaults(load)]),
        ]


def _share(equal: Mapping[str, Any]) -> str:
    return f"{equal['tokens_before_a_difference']} of {equal['tokens']}"
