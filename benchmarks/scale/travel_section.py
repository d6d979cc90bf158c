"""Section of the results page on blocks that travel: tables and verdicts of the benchmark's figures."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.page_section import SERVICES, Document, Headline, PageSection, Section, Target, at_most, grid, listed

TARGET = 1.2  # p99 under prompts, as a multiple of idle
QUICKER_FROM = 1000  # tokens of context

ROLES, MIXED, APART = "prefill and decode", "two mixed", "prompts elsewhere"

ROLES_HEAD = ("workers", "idle p50, ms", "p99", "beside prompts p50, ms", "p99", "p99, × idle", "rounds", "prompts/s",
              "first token of a prompt, ms", "second, after")  # fmt: skip
MOVES_HEAD = ("tokens of context", "fetched, ms", "rounds", "computed, ms", "rounds", "fetched / computed")


def ratio_of(measured: Sequence[dict[str, Any]]) -> float:
    """Median over the rounds of p99 beside prompts / p99 idle."""
    return median(float(each["prompts_p99_ms"] / each["idle_p99_ms"]) for each in measured)


def role_cells(roles: dict[str, list[dict[str, Any]]]) -> list[list[object]]:
    """Rows of the table of roles: medians over the rounds."""
    rows: list[list[object]] = []
    for name, measured in roles.items():
        ratios = [each["prompts_p99_ms"] / each["idle_p99_ms"] for each in measured]
        middle = {key: median(each[key] for each in measured) for key in measured[0]}
        times = [f"{middle[f'{phase}_{rank}_ms']:.1f}" for phase in ("idle", "prompts") for rank in ("p50", "p99")]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        asked = [f"{middle['first_token_p50_ms']:,.0f}", f"{middle['second_token_p50_ms']:,.0f}"]
        rows.append([name, *times, f"{median(ratios):.2f}", spread, f"{middle['prompts_per_s']:.2f}", *asked])
    return rows


def move_cells(moves: Sequence[dict[str, Any]]) -> list[list[object]]:
    """Rows of the table of moves: medians over the rounds."""
    rows: list[list[object]] = []
    for row in moves:
        cells: list[object] = [row["context"]]
        for times in (row["fetched_ms"], row["computed_ms"]):
            cells += [f"{median(times):,.0f}", f"{min(times):,.0f} to {max(times):,.0f}"]
        rows.append([*cells, f"{median(row['fetched_ms']) / median(row['computed_ms']):.2f}"])
    return rows


def section_of(document: Document) -> Section:
    shortest, longest = document["prompt_lengths"]
    ratios = {name: ratio_of(measured) for name, measured in document["roles"].items()}
    figure = (
        f"Beside long prompts the p99 of a running request's tokens is {ratios[ROLES]:.2f} × idle with a prefill and "
        f"a decode worker, {ratios[MIXED]:.2f} × with two mixed ones, and {ratios[APART]:.2f} × where another "
        f"deployment computes the prompts on the same machine"
    )
    headlines = [Headline(figure, [at_most(ratios[ROLES], TARGET, "× idle")]), _moves_headline(document["moves"])]
    if (speed := document["fetch_blocks_per_s"]) is not None:
        bytes_per_s = speed * document["bytes_per_block"]
        headlines.append(
            Headline(f"Fetches as the scheduler measures them: {speed:,.0f} blocks/s, {bytes_per_s / 1e6:,.0f} MB/s")
        )
    return Section(
        done=(
            f"Workers of one thread each on {document['cores']} cores, with the scheduler and the clients beside them; "
            f"a random {document['shape']}, {document['dtype']}. {document['running']} running requests; prompts of "
            f"{shortest:,} to {longest:,} tokens, one after the other, with {document['prompt_output']} tokens of "
            f"output. A request moves because its worker drains: the longest time between two of its tokens, with "
            f"`--block-fetch always` and `never`. Medians of {document['rounds']} rounds."
        ),
        headlines=headlines,
        blocks=[
            grid(ROLES_HEAD, role_cells(document["roles"])),
            grid(MOVES_HEAD, move_cells(document["moves"])),
        ],
        versions=("grpcio", "torch"),
    )


def _moves_headline(moves: Sequence[dict[str, Any]]) -> Headline:
    quicker = [row["context"] for row in moves if median(row["fetched_ms"]) < median(row["computed_ms"])]
    judged = [row["context"] for row in moves if row["context"] >= QUICKER_FROM]
    words = f"A moved request goes on sooner with its blocks fetched than computed with contexts of {listed(quicker)}"
    is_met = all(context in quicker for context in judged) if judged else None
    return Headline(f"{words} tokens", [Target(f"from {QUICKER_FROM:,} tokens on", is_met)])


SECTION = PageSection(
    kinds=("block_travel",),
    title="Blocks that travel",
    question="What do prefill and decode workers do for running requests, and how long does a move take?",
    command="python -m benchmarks.scale.block_travel",
    measures=SERVICES,
    target=f"p99 between tokens beside long prompts ≤ {TARGET} × idle; moved sooner than computed from "
    f"{QUICKER_FROM:,} tokens of context on",
    render=section_of,
)
