"""`docs/scaling.md` and its plots, made of the result file alone: the same file gives the same page."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fleet.fleet_jobs import ROWS
from benchmarks.fleet.page_words import BOTTLENECK, FOUND, REAL, WHAT
from benchmarks.fleet.plots import Figures, plots
from benchmarks.fleet.sizing import ENOUGH, Sizing, sizings
from benchmarks.page_section import commit_of, grid
from benchmarks.paper.jobs import Row
from benchmarks.report import RESULTS
from benchmarks.svg_chart import write_plots
from scheduler_svc.leadership.shard_watch import look_every_s

PLOTS = "scaling"  # folder beside the page
GPU = "8 B on a GPU"
FREE = 0.8  # part of a limit that a deployment should plan with


def write_page(result: dict[str, Any], docs: Path) -> None:
    """Write the page, and the plots into a folder of their own, whose old plots are removed."""
    write_plots(docs / PLOTS, plots(result["figures"]))
    (docs / "scaling.md").write_text("\n\n".join(_page(result)) + "\n")


def _page(result: dict[str, Any]) -> Iterator[str]:
    figures: Figures = result["figures"]
    yield "# Scaling"
    yield WHAT
    if result["quick"]:
        yield f"**Quick looks with a tenth of everything, until they are run in full: {', '.join(result['quick'])}.**"
    yield from _sizing(figures, result["costs"])
    yield from _shards(figures)
    yield from _bottleneck(figures)
    yield from _gateways(figures)
    yield from _rack(figures)
    yield from _start(figures)
    yield from _three_shards(figures)
    yield "## What is real, and what is assumed"
    yield "\n".join(f"- {text.format(**_parameters(result['costs']))}" for text in REAL)
    yield "## Found at this size"
    rates = {"store_100": 4 * 100 * 100 / look_every_s(100), "trips_100": 100 / look_every_s(100)}
    yield "\n".join(f"- {text.format(**rates)}" for text in FOUND)
    yield from _measured_here(figures)
    machine = result["machine"]
    yield f"Made with Python {result['versions']['python']}, on {machine['cpu']}, {machine['cpus']} cores:"
    made_by: dict[tuple[str, str], list[str]] = {}
    for question, how in result["made_by"].items():
        made_by.setdefault((f"`{how['command']}`", commit_of(how["commit"])), []).append(question)
    yield grid(("command", "commit", "questions"), [(*how, ", ".join(names)) for how, names in made_by.items()])


def _sizing(figures: Figures, costs: dict[str, Any]) -> Iterator[str]:
    yield "## Sizing"
    found = sizings(figures["saturation"])
    yield grid(
        ("workers", "live requests each", "step, ms", "scheduler, ms a step", "workers a scheduler", "plan with",
         "tokens/s a scheduler", "schedulers for 1,000 workers"),
        [_sizing_cells(each) for each in found],
    )  # fmt: skip
    yield (
        "*workers a scheduler*: the most of which one scheduler gets at least "
        f"{ENOUGH:.0%} of what they give alone, found by simulation; it is near step ÷ scheduler's time a step. "
        f"*plan with*: {FREE:.0%} of it, for bursts, prefills and adoption. For other workers: measure the time of a "
        "step, take the scheduler's time for your rows from this table, and divide. *schedulers*: 1,000 ÷ plan with."
    )
    token_us = 1e6 * costs["gateway_token_s"]
    yield grid(
        ("also", "how many", "by"),
        [
            ("gateways", f"one for {FREE / costs['gateway_token_s']:,.0f} tokens/s",
             f"{token_us:.1f} µs of CPU a token (`gateway_cost.json`), {FREE:.0%} used; none for clients of the SDK"),
            ("standbys", "as many schedulers as a rack has, beside one a shard",
             "each stands by for one shard, follows its journal and takes over when the lease has run out"),
            ("store", f"{4 * 100 * 100 / look_every_s(100):,.0f} commands/s of looks, at 100 schedulers and shards",
             "4 commands a shard for each scheduler at each look; beside that one journal entry a step of each worker"),
            ("memory of a scheduler", "80 MB, and 15.5 KB a live request", "resident memory in `scale.json`"),
        ],
    )  # fmt: skip


def _sizing_cells(each: Sizing) -> tuple[object, ...]:
    planned = max(1, int(FREE * each.num_workers))
    rate = f"{each.tokens_per_s:,}"
    return each.worker, each.rows, each.step_ms, each.scheduler_ms, each.num_workers, planned, rate, -(-1000 // planned)


def _shards(figures: Figures) -> Iterator[str]:
    rows = figures["shards"]
    yield "## Shards"
    yield f"{GPU}, {ROWS} live requests a worker, one scheduler a shard."
    yield _fleet_table([*figures["shards"], *figures["largest"]])
    yield f"![shards]({PLOTS}/shards_rate.svg)"
    yield f"![time to first token]({PLOTS}/shards_first_token.svg)"
    best = max(rows, key=lambda row: row["tokens_per_s"])
    enough = min(row["num_shards"] for row in rows if row["tokens_per_s"] >= ENOUGH * best["tokens_per_s"])
    yield (
        f"{rows[0]['num_workers']} workers need {enough} shards for {ENOUGH:.0%} of what they give with "
        f"{best['num_shards']}; with fewer, tokens/s fall in proportion."
    )


def _fleet_table(rows: Sequence[Row]) -> str:
    head = ("workers", "shards", "live requests", "tokens/s", "a worker", "first token p50, s", "p99, s", "ms a token",
            "schedulers busy", "workers busy")  # fmt: skip
    return grid(head, [_fleet_cells(row) for row in rows])


def _fleet_cells(row: Row) -> tuple[object, ...]:
    each = f"{row['tokens_per_s'] / row['num_workers']:,.0f}"
    first = (row["ttft_p50_s"], row["ttft_p99_s"], row["token_ms"])
    size = (row["num_workers"], row["num_shards"], row["num_clients"], row["tokens_per_s"], each)
    return *size, *first, _percent(row["scheduler_busy"]), _percent(row["worker_busy"])


def _percent(part: float) -> str:
    return f"{min(1.0, part):.0%}"


def _bottleneck(figures: Figures) -> Iterator[str]:
    yield "## The first bottleneck"
    yield f"![workers of a scheduler]({PLOTS}/workers_of_a_scheduler.svg)"
    yield BOTTLENECK
    yield grid(
        ("workers", "live requests each", "scheduler's CPU time", "tokens/s", "ms a token", "scheduler busy",
         "workers busy"),
        [
            (row["worker"], row["rows"], f"× {row['factor']:g}", row["tokens_per_s"], row["token_ms"],
             _percent(row["scheduler_busy"]), _percent(row["worker_busy"]))
            for row in figures["moves"]
        ],
    )  # fmt: skip
    yield (
        "Half the CPU time a token gives nearly twice the tokens, until the workers are the limit. Larger batches "
        "do not "
        "move it, since the cost is one of tokens; larger models do, since their steps are longer: fewer, dearer "
        "tokens."
    )


def _gateways(figures: Figures) -> Iterator[str]:
    rows = figures["gateways"]
    yield "## Gateways"
    yield (
        f"{rows[0]['num_workers']} workers ({GPU}), {rows[0]['num_shards']} shards, {rows[0]['num_clients']:,} live "
        f"requests. "
        "A gateway that is full holds tokens back without a limit here, so clients wait in it."
    )
    yield grid(
        ("gateways", "tokens/s", "first token p50, s", "p99, s", "ms a token"),
        [
            (row["num_gateways"], row["tokens_per_s"], row["ttft_p50_s"], row["ttft_p99_s"], row["token_ms"])
            for row in rows
        ],
    )
    yield f"![gateways]({PLOTS}/gateways.svg)"


def _rack(figures: Figures) -> Iterator[str]:
    yield "## A lost rack"
    yield (
        f"A tenth of the workers and of the schedulers is gone at once, whatever they serve; there is no standby "
        f"beside "
        f"the schedulers that lead. {GPU}, {ROWS} live requests a worker. *Stall*: from the loss to the next token "
        f"of a "
        "request that ran there."
    )
    rows = figures["rack"]
    lines: list[tuple[str, str]] = [
        ("workers", "num_workers"), ("shards", "num_shards"), ("live requests", "num_clients"),
        ("workers lost", "workers_lost"), ("schedulers lost", "schedulers_lost"),
        ("requests hit", "requests_hit"), ("without a token at the end", "requests_still_waiting"),
        ("failed", "requests_killed"), ("stall p50, s", "stall_p50_s"), ("stall p99, s", "stall_p99_s"),
        ("longest stall, s", "stall_max_s"), ("tokens whose KV was lost, computed again", "lost_tokens"),
        ("tokens/s before", "tokens_per_s_before"), ("least, in a quarter of a second", "least_tokens_per_s"),
        ("in the last two seconds", "tokens_per_s_after"), ("first token p99 before, s", "ttft_p99_before_s"),
        ("after the loss, s", "ttft_p99_after_s"), ("most shards that one leads", "most_led_by_one"),
        ("workers that moved", "num_moves"), ("last move, s after the loss", "last_move_s"),
    ]  # fmt: skip
    yield grid(("", *(f"{row['num_workers']:,} workers" for row in rows)),
               [(name, *(row[key] for row in rows)) for name, key in lines])  # fmt: skip
    for row in rows:
        yield f"![lost rack]({PLOTS}/rack_{row['num_workers']}.svg)"
    yield (
        "Requests on lost workers go on after the 1.8 s in which a host is missed. Those of lost schedulers wait "
        "for the "
        "lease, half a lease and a look until others notice, one more lease, and the rebuilding. Nothing is lost."
    )


def _start(figures: Figures) -> Iterator[str]:
    yield "## A start"
    yield "Schedulers come within 2 s, workers 15 s later, within 2 s. Seconds after the first of each."
    yield grid(
        ("workers", "shards", "all shards led, s", "each leads one, s", "all workers serve, s", "fewest then",
         "most then", "moves until even", "last move, s", "even after 30 s"),
        [
            (row["num_workers"], row["num_shards"], row["all_led_s"], row["one_each_s"], row["all_serve_s"],
             row["least_then"], row["most_then"], row["num_moves"], row["last_move_s"], row["is_even"])
            for row in figures["start"]
        ],
    )  # fmt: skip


def _three_shards(figures: Figures) -> Iterator[str]:
    yield "## Three shards, beside the measurement"
    measured = json.loads((RESULTS / "shard_throughput.json").read_text())["rows"]
    by_batch = {row["batch"]: row for row in measured}
    yield (
        "Two workers of 8 ms a step for each shard, eight clients. In virtual time no core is shared: this is the "
        "ratio "
        "without that limit, and the rate of one shard tells how near the simulation is to real processes."
    )
    yield grid(
        ("sequences a worker", "one shard, tokens/s", "really measured", "difference", "three shards", "ratio",
         "really measured",
         "scheduler busy, one", "three"),
        [
            (row["batch"], f"{row['one']:,.0f}", f"{by_batch[row['batch']]['one']['tokens_per_s']:,.0f}",
             f"{100 * (row['one'] / by_batch[row['batch']]['one']['tokens_per_s'] - 1):+.1f} %", f"{row['three']:,.0f}",
             row["ratio"], sorted(by_batch[row["batch"]]["ratios"])[1], _percent(row["scheduler_busy_one"]),
             _percent(row["scheduler_busy_three"]))
            for row in figures["three_shards"]
        ],
    )  # fmt: skip


def _measured_here(figures: Figures) -> Iterator[str]:
    yield "## Measured while this was made"
    yield "CPU time of the real code on the machine that made this page, whatever else ran there; not virtual."
    yield grid(
        (
            "shards",
            "a client chooses a shard, µs",
            "a scheduler decides what it leads, µs",
            "a leader decides who moves, µs",
        ),
        [
            (
                row["num_shards"],
                row["host"]["choose_shard_us"],
                row["host"]["next_roles_us"],
                row["host"]["shard_in_need_us"],
            )
            for row in figures["decisions"]
        ],
    )
    timed = [row for name in ("largest", "rack") for row in figures[name] if "host" in row]
    words = ", ".join(
        f"{row['host']['core_us_a_row']} µs a row with {row['num_workers']:,} workers and {row['num_shards']} shards"
        for row in timed
    )
    yield (
        f"The core with what surrounds it here (planning, applying, ends, clients' next requests not included): "
        f"{words}. "
        "That is part of what is charged as the scheduler's CPU time (8 to 23 µs a row)."
    )


def _parameters(costs: dict[str, Any]) -> dict[str, Any]:
    scheduler = costs["scheduler"]
    (gpu,) = [each for each in costs["workers"] if each["name"] == GPU]
    return {
        "step_ms": 1e3 * gpu["step_s"],
        "row_us": 1e6 * gpu["row_s"],
        "context_ns": 1e9 * gpu["context_token_s"],
        "prompt_us": 1e6 * gpu["prompt_token_s"],
        "points": ", ".join(f"{1e3 * cost_s:.2f} ms with {rows}" for rows, cost_s in scheduler["points"]),
        "turn": scheduler["turn_part"],
        "request_us": 1e6 * scheduler["request_s"],
        "rebuild_us": 1e6 * (scheduler["rebuild_s"] + scheduler["journal_read_s"]),
        "live": ROWS,
    }
