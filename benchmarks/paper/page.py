"""`docs/paper.md` and its plots, made of the result file alone: the same file gives the same page."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.plots import plots
from benchmarks.paper.published import DISAGREEMENTS
from benchmarks.paper.tables import tables
from benchmarks.paper.verdicts import Figures, Verdict, verdicts
from benchmarks.report import markdown_table
from benchmarks.svg_chart import write_plots

PLOTS = "paper"  # folder beside the page

WHAT = """\
Quire's own scheduler and block manager serve the paper's workloads (arXiv 2309.06180) in virtual time, and beside \
them the systems that it was compared with. Nothing is computed: a step takes what a cost model says. So these figures \
say what memory management and scheduling do, and nothing of kernels; everything in which the systems differ is in \
their memory and in who is admitted when.

This page is made by `python -m benchmarks.paper` from `benchmarks/results/paper.json`; nobody edits it. Time is \
virtual and everything random has a seed: two runs give the same numbers, whatever the machine."""

BOUNDS = """\
They are: 4 points in Fig. 2, 15 % in the ratios of Fig. 12 to the three Orcas and in Orca's batches of Fig. 13 \
(OPT-13B), 1 point in Fig. 15 (parallel sampling, Alpaca); every other line is reported further below. Where two \
readings are possible both are counted. Figs. 2 and 13 are of a load of 2 requests/s on ShareGPT, which was more than \
the paper's vLLM bore (1.93). With the plain costs Quire bears more than 2, so its memory is not full there; with \
costs × 1.17, and at 4 requests/s, it is short of memory as the paper's was."""

ASSUMPTIONS = (
    "**One cost model**, for every system and figure: a step takes {step_ms:.2f} ms + {sequence_ms:.3f} ms × sequences "
    "+ {prompt_us:.0f} µs × prompt tokens. The first two are the line through Fig. 1, the third is 26 GFLOP at "
    "170 TFLOP/s. Swapping is the line through Fig. 19a. The length of contexts costs nothing.",
    "**The other reading**: all costs × {factor:g}. With it the rates of OPT-13B on ShareGPT are nearer those of Fig. "
    "12; without it they are higher than the paper's, and those on Alpaca fit. Neither is fitted to any ratio.",
    "**OPT-66B and OPT-175B**: OPT-13B's costs, scaled by the bytes and operations of each GPU; communication is free. "
    "They are reported, not held against the paper.",
    "**Lengths**: the histograms of Fig. 11. Alpaca's inputs and outputs are paired as in its data (the longer half of "
    "the prompts has the shorter half of the answers in 63 % of the pairs), ShareGPT's are independent. Arrivals are "
    "a Poisson process; traces of {sharegpt_s:g} s on ShareGPT and {alpaca_s:g} s on Alpaca (of figures that are only "
    "reported {short_sharegpt_s:g} and {short_alpaca_s:g} s). The paper's were an hour.",
    "**Quire**: the core's scheduler, blocks of 16, watermark 1 %, up to 256 sequences and 2,560 tokens a step, one "
    "step in flight, prompts in chunks, no prefix cache but in Fig. 16; requests of one sequence are computed again "
    "after a preemption, groups are swapped.",
    "**Orca**: iterations, whole prompts, no preemption; a request is admitted when a buddy allocator over the pool's "
    "slots has a range for its reservation: 2,048 slots (Max), the input and the output rounded up to a power of two "
    "(Pow2), or what it will use (Oracle). Samples share nothing: each has its own range and computes its own prompt.",
    "**FasterTransformer**: the earliest requests, as many as the pool holds at 2,048 slots each (7 of OPT-13B), run "
    "until the longest is done. On Alpaca the paper's is more than twice as fast as this: its batch was larger, and "
    "how it was chosen is not said.",
    "**Fig. 14, 15, beams**: no model of that size is here. Next tokens are as likely as a random process makes them "
    "(stick-breaking of the stated mean entropy), and the best beams live on. `benchmarks/results/memory_saving.json` "
    "has beams of a real, small model.",
    "**Fig. 16**: the paper does not give the lengths of WMT16's sentences. Assumed: log-normal with the stated means "
    "and a spread of 0.5, two readings. LLaMA-13B has OPT-13B's memory and costs.",
    "**Fig. 17**: how long conversations are is not given either; two readings. Orca's Pow2 was not read off.",
    "**Fig. 18b, 19b**: the rates are not given. Ours are those at which block size 16 has the paper's latency; the "
    "other sizes follow. Small blocks cost an attention kernel time that is not in the cost model, so the left side "
    "of Fig. 18b is missing here.",
)

CAPTIONS = {
    "fig1": "Fig. 1 and Table 1: memory and throughput",
    "fig2": "Fig. 2: where the KV memory is",
    "fig11": "Fig. 11: lengths",
    "fig12": "Fig. 12: one sequence a request",
    "fig13": "Fig. 13: batched requests",
    "fig14": "Fig. 14: parallel sampling and beam search",
    "fig15": "Fig. 15: blocks saved by sharing",
    "fig16": "Fig. 16: a shared prefix",
    "fig17": "Fig. 17: a chatbot",
    "fig18b": "Fig. 18b: the block size",
    "fig19": "Fig. 19: swapping and computing again",
}


def write_page(result: dict[str, Any], docs: Path) -> None:
    """Write the page, and the plots into a folder of their own, whose old plots are removed."""
    made = plots(result["figures"])
    write_plots(docs / PLOTS, made)
    (docs / "paper.md").write_text("\n".join(_page(result, list(made))) + "\n")


def _page(result: dict[str, Any], names: Sequence[str]) -> Iterator[str]:
    figures: Figures = result["figures"]
    found = verdicts(figures)
    yield "# The paper's evaluation, reproduced\n"
    yield WHAT + "\n"
    if result["is_quick"]:
        yield "**These are traces of seconds, to see that it runs: the numbers mean nothing.**\n"
    yield "## What is asked, and what came of it\n"
    yield from _summary(found)
    yield "## What is assumed\n"
    yield from (f"- {text.format(**_parameters(result))}" for text in ASSUMPTIONS)
    yield "\n## Where the paper's text and figures disagree\n"
    yield from (f"- {text}" for text in DISAGREEMENTS)
    for figure, caption in CAPTIONS.items():
        yield f"\n## {caption}\n"
        if not any(_belongs(name, figure) for name in figures):
            yield "Not in this result.\n"
        yield from tables(figure, figures)
        own = [verdict for verdict in found if verdict.figure == figure]
        if own:
            yield from markdown_table(("", "paper", "ours", "difference", ""), [_cells(each) for each in own])
        yield from (f"![{name}]({PLOTS}/{name}.svg)\n" for name in names if _belongs(name, figure))
    yield "## How it was made\n"
    yield f"Python {result['versions']['python']} on {result['machine']['cpu']}, {result['machine']['cpus']} cores.\n"
    made_by: dict[str, list[str]] = {}
    for name, how in result["made_by"].items():
        made_by.setdefault(f"| `{how['command']}` | {how['commit']} |", []).append(name)
    yield "| command | commit | figures |\n|---|---|---|"
    yield from (f"{how} {', '.join(names)} |" for how, names in made_by.items())


def _summary(found: Sequence[Verdict]) -> Iterator[str]:
    """Summarise claim by claim, in the order of figures; a figure is met if all of its lines are."""
    held = [verdict for verdict in found if verdict.verdict != "reported"]
    num_met = sum(verdict.verdict == "met" for verdict in held)
    yield f"{num_met} of {len(held)} comparisons are within their bounds. " + BOUNDS + "\n"
    yield from markdown_table(("", "paper", "ours", "difference", ""), [_cells(each) for each in held])


def _cells(verdict: Verdict) -> tuple[object, ...]:
    mark = f"**{verdict.verdict}**" if verdict.verdict == "not met" else verdict.verdict
    return verdict.claim, f"{verdict.paper:g}", f"{verdict.ours:g}", verdict.difference, mark


def _belongs(name: str, figure: str) -> bool:
    return name == figure or name.startswith((f"{figure}_", f"{figure}a", f"{figure}b"))


def _parameters(result: dict[str, Any]) -> dict[str, float]:
    costs, scale = result["costs"], result["scale"]
    return {
        "step_ms": 1e3 * costs["step_s"],
        "sequence_ms": 1e3 * costs["sequence_s"],
        "prompt_us": 1e6 * costs["prompt_token_s"],
        "factor": result["parameters"]["other_cost_factor"],
        "sharegpt_s": scale["duration_s"]["sharegpt"],
        "alpaca_s": scale["duration_s"]["alpaca"],
        "short_sharegpt_s": scale["short_s"]["sharegpt"],
        "short_alpaca_s": scale["short_s"]["alpaca"],
    }
