"""Runs of peers as a campaign records them; only the requested figure has a meaning."""

from typing import Any

from benchmarks.peers.figures import Figures
from benchmarks.peers.runs_file import Run


def figures(tokens_per_s: float) -> Figures:
    return Figures(
        tokens_per_s=tokens_per_s,
        seconds=2.0,
        normalised_latency_s=0.01,
        first_token_p50_s=0.1,
        first_token_p99_s=0.2,
        per_token_p50_s=0.01,
        per_token_p99_s=0.02,
        peak_memory_mib=100.0,
    )


def run(system: str, load: str = "sharegpt", rate: float = 100.0, number: int = 0, **more: Any) -> Run:
    return Run(round=number, system=system, load=load, figures=figures(rate), **more)
