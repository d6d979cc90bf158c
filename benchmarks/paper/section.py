"""Section of the results page: the paper's evaluation in virtual time."""

from collections import Counter

from benchmarks.page_section import CORE, Document, Headline, PageSection, Section, Target, grid
from benchmarks.paper.verdicts import verdicts


def section_of(document: Document) -> Section:
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


SECTION = PageSection(
    kinds=("paper",),
    title="The paper's evaluation",
    question="Do the paper's figures come out again, in virtual time?",
    command="python -m benchmarks.paper",
    measures=(*CORE, "benchmarks/paper"),
    target="all comparisons within their bounds",
    render=section_of,
)
