"""Section of what `tests.scaling` measures: services that are scaled up and down while streams are read."""

from benchmarks.page_section import (
    SERVICES,
    Document,
    Headline,
    PageSection,
    ResultRow,
    Section,
    Target,
    at_most,
    grid,
    number,
)


def scaling(document: Document) -> Section:
    runs: list[ResultRow] = document["runs"]
    most_s = document["most_pause_s"]
    return Section(
        done=(
            "Streams one after another, two thirds by the SDK with ids of their own, one third over HTTP, greedy and "
            "with seeds; three shards. Workers 1 → 4, schedulers 1 → 3, then both back to 1 (SIGTERM). Each stream is "
            "compared with its reference, token by token, and each request's record at the end. A change is whole when "
            "as many schedulers lead and as many workers serve. The demo model; workers of one thread each."
        ),
        headlines=[headline for run in runs for headline in _of_run(run, most_s)],
        blocks=[
            grid(
                ("", "change", "whole after", "longest pause", "longest wait for a first token"),
                [(run["deployment"], *_step(step)) for run in runs for step in run["steps"]],
            ),
            grid(
                ("", "ended by SIGTERM", "under load", "after"),
                [
                    (run["deployment"], end["name"], end["under_load"], f"{end['time_s']:.1f} s")
                    for run in runs
                    for end in run["ends"]
                ],
            ),
        ],
        versions=("grpcio", "torch"),
    )


def _of_run(run: ResultRow, most_s: float) -> list[Headline]:
    pause_s = run["longest_pause_s"]
    return [
        Headline(
            f"{run['deployment']}: no stream stood still for longer than {number(pause_s, 2, most_s)} s",
            [at_most(pause_s, most_s, "s")],
        ),
        Headline(
            f"{run['deployment']}: {run['streams']:,} streams with {run['tokens']:,} tokens, none lost or changed",
            [Target("none", is_met=True)],  # else there is no result
        ),
    ]


def _step(step: ResultRow) -> tuple[str, ...]:
    times = (step["whole_after_s"], step["longest_pause_s"], step["longest_wait_for_first_token_s"])
    return (step["step"], *(f"{time_s:.1f} s" for time_s in times))


SCALING = PageSection(
    kinds=("scaling_under_load",),
    title="Scaling under load",
    question="Does a stream notice that workers and schedulers come and go, as containers and as processes?",
    command="python -m tests.scaling --record",
    measures=(*SERVICES, "gateway_svc", "compose.yaml", "Dockerfile", "tests/scaling"),
    target="nothing lost, no stream without a token for longer than 3 s",
    render=scaling,
)
