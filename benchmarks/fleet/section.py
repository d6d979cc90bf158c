"""Section of the results page: fleets in virtual time."""

from benchmarks.fleet.sizing import sizings
from benchmarks.page_section import Document, Headline, PageSection, Section, Target, at_least, grid

TARGET = 2.8  # for three shards
MEASURED = (
    "scheduler_svc/core",
    "scheduler_svc/leadership/shard_choice.py",
    "quire/shards.py",
    "quire/shard_router.py",
)


def section_of(document: Document) -> Section:
    figures = document["figures"]
    worst = min(row["ratio"] for row in figures["three_shards"])
    (biggest, *_) = sorted(figures["rack"], key=lambda row: -row["num_workers"])
    num_open = biggest["requests_still_waiting"] + biggest["requests_killed"]
    headlines = [
        Headline(f"three shards give {worst:g} × one, in virtual time", [at_least(worst, TARGET, "×")]),
        Headline(
            f"{biggest['num_workers']:,} workers, {biggest['num_shards']} shards, {biggest['num_clients']:,} live "
            f"requests: a tenth is lost at once, and each of {biggest['requests_hit']:,} requests goes on within "
            f"{biggest['stall_max_s']:g} s",
            [Target("none lost", num_open == 0)],
        ),
    ]
    done = (
        "The real scheduler, router and placement code in virtual time, with simulated workers; CPU time of schedulers "
        "as it was measured. [scaling.md](scaling.md) has every figure, a table for sizing, and what is assumed."
    )
    if document["quick"]:
        done += f" **Quick looks with a tenth of everything: {', '.join(document['quick'])}.**"
    return Section(
        done=done,
        headlines=headlines,
        blocks=[
            grid(
                ("workers", "live requests each", "workers a scheduler", "tokens/s a scheduler"),
                [
                    (each.worker, each.rows, each.num_workers, each.tokens_per_s)
                    for each in sizings(figures["saturation"])
                ],
            ),
            grid(
                ("shards", "tokens/s", "first token p50, s", "p99, s"),
                [
                    (row["num_shards"], row["tokens_per_s"], row["ttft_p50_s"], row["ttft_p99_s"])
                    for row in figures["shards"]
                ],
            ),
        ],
        versions=(),
    )


SECTION = PageSection(
    kinds=("fleet",),
    title="Fleets",
    question="How far do schedulers, shards and gateways scale, and what does the loss of a rack do?",
    command="python -m benchmarks.fleet",
    measures=MEASURED,
    target=f"three shards give at least {TARGET} × one; a lost rack loses no request",
    render=section_of,
)
