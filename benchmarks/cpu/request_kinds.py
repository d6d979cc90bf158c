"""Speed of requests of all kinds beside plain greedy ones: the cost of sampling, log-probabilities, grammars, beams.

    python -m benchmarks.cpu.request_kinds [--model 206m] [--kinds top-p beams] [--requests 384] [--rounds 3]

One deployment of real processes serves a random model on a CPU. Kinds run in turn, round by round, another one first
each time, with Alpaca's lengths to their full length; as many sequences run at once as the worker takes. A ratio is of
two runs of one round. Of a beam search, the tokens of each beam count.
"""

import argparse
import asyncio
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import uvloop

from benchmarks.lengths import PAIRED, Lengths, LengthSampler
from benchmarks.page_section import (
    SERVICES,
    Document,
    Headline,
    PageSection,
    ResultRow,
    Section,
    at_least_in_rounds,
    grid,
    number,
)
from benchmarks.random_models import SHAPES, scratch_folder, write_random_model
from benchmarks.report import RESULTS, table, write_result
from benchmarks.services.model_services import Deployment, Site, serving
from quire import AsyncClient

GREEDY = "greedy"
NUM_BEAMS = 4
_NUM_SPECIAL_TOKENS = 3
_BIASED = dict.fromkeys(range(10, 42), 1.5)
# Longer than any output here: an output that ended by itself would have fewer tokens than the others.
_RECORDS = {
    "type": "array",
    "minItems": 5000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["animal", "vegetable", "mineral"]},
            "amount": {"type": "integer"},
            "is_new": {"type": "boolean"},
        },
        "required": ["name", "kind", "amount", "is_new"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Parameters of requests, and the least tokens a second, as a part of those of plain greedy requests."""

    name: str
    least: float | None
    least_alone: float | None = None  # of one sequence at once, where that differs
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        """Sequences of a request."""
        return int(self.params.get("beam_width", 1))


KINDS = (
    Kind(name=GREEDY, least=None, params={"temperature": 0.0}),
    Kind(name="temperature", least=0.95, params={"temperature": 1.0}),
    Kind(name="top-k", least=0.95, params={"temperature": 1.0, "top_k": 50}),
    Kind(name="top-p", least=0.95, params={"temperature": 1.0, "top_p": 0.95}),
    Kind(name="min-p", least=0.95, params={"temperature": 1.0, "min_p": 0.05}),
    Kind(
        name="penalties",
        least=0.95,
        params={"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2},
    ),
    Kind(name="bias", least=0.95, params={"temperature": 0.0, "logit_bias": _BIASED}),
    Kind(name="stop-strings", least=0.95, params={"temperature": 0.0, "stop": ["\n\nThe end.", "</answer>"]}),
    Kind(name="logprobs", least=0.93, params={"temperature": 0.0, "logprobs": 5}),
    Kind(
        name="json-schema",
        least=0.95,
        least_alone=1.0,  # what its grammar forces comes several tokens at once
        params={"temperature": 0.0, "json_schema": _RECORDS, "ignore_eos": False},
    ),
    Kind(name="beams", least=0.5, params={"beam_width": NUM_BEAMS, "n": NUM_BEAMS}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind, medians of all rounds."""

    kind: str
    tokens_per_s: float
    ratio: float  # to plain greedy requests of the same round
    worst_ratio: float
    best_ratio: float
    least: float | None


async def measure(client: AsyncClient, kind: Kind, lengths: Sequence[Lengths], vocab_size: int, seed: str) -> float:
    """Tokens a second of all beams, from the first submission to the last end."""
    generator = random.Random(seed)  # of this run alone, so that no prompt was computed before

    async def run(each: Lengths) -> int:
        prompt = [generator.randrange(_NUM_SPECIAL_TOKENS, vocab_size) for _ in range(each.num_input)]
        params = {"max_tokens": each.num_output, "ignore_eos": True, "seed": 7, **kind.params}
        done = await client.generate(prompt, **params)
        num_tokens = sum(len(sample.token_ids) for sample in done.samples)
        if num_tokens != each.num_output * kind.num_sequences:
            raise RuntimeError(f"{kind.name}: {num_tokens} tokens came, not {each.num_output} for each sequence")
        return num_tokens

    # The longest come first: else a run would end with few sequences at once.
    lengths = sorted(lengths, key=lambda each: each.num_output, reverse=True)[:: kind.num_sequences]
    began_s = time.perf_counter()
    num_tokens = sum(await asyncio.gather(*map(run, lengths)))
    return num_tokens / (time.perf_counter() - began_s)


async def measure_kinds(
    site: Site, kinds: Sequence[Kind], options: argparse.Namespace, vocab_size: int
) -> dict[str, list[float]]:
    """Tokens a second of each kind, by round; the first round, of a quarter of the requests, only warms up."""
    measured: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    async with AsyncClient(site.address) as client:
        await client.wait_ready(60.0)
        for round_number in range(options.rounds + 1):
            sampler = LengthSampler("alpaca", round_number, opposite_halves=PAIRED["alpaca"])
            lengths = sampler.draw(options.requests if round_number else max(1, options.requests // 4))
            first = round_number % len(kinds)
            for kind in (*kinds[first:], *kinds[:first]):
                speed = await measure(client, kind, lengths, vocab_size, f"{round_number}/{kind.name}")
                print(f"round {round_number}, {kind.name}: {speed:,.0f} tokens/s", flush=True)
                if round_number:
                    measured[kind.name].append(speed)
    return measured


def row_of(kind: Kind, measured: dict[str, list[float]], num_sequences: int) -> Row:
    """The medians of one kind; its rounds and those of plain greedy requests correspond."""
    is_alone = num_sequences == 1 and kind.least_alone is not None
    own, greedy = measured[kind.name], measured[GREEDY]
    ratios = [one / other for one, other in zip(own, greedy, strict=True)]
    return Row(
        kind=kind.name,
        tokens_per_s=round(median(own), 1),
        ratio=round(median(ratios), 4),
        worst_ratio=round(min(ratios), 4),
        best_ratio=round(max(ratios), 4),
        least=kind.least_alone if is_alone else kind.least,
    )


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="206m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--kinds", nargs="+", choices=[kind.name for kind in KINDS[1:]], help="beside greedy; all")
    parser.add_argument("--sequences", type=int, default=64, help="that run at once")
    parser.add_argument("--requests", type=int, default=384, help="of a run; of beam searches, beams are counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    shape = SHAPES[options.model]
    kinds = [kind for kind in KINDS if options.kinds is None or kind.name in (GREEDY, *options.kinds)]
    folder = scratch_folder(4 * shape.num_step_weights)
    try:
        write_random_model(shape, folder, torch.device("cpu"), dtype=getattr(torch, options.dtype))
        deployment = Deployment(
            model=folder,
            device="cpu",
            dtype=options.dtype,
            max_num_seqs=options.sequences,
            max_batched_tokens=None,
        )
        with serving(deployment) as site:
            measured = uvloop.run(measure_kinds(site, kinds, options, shape.vocab_size))
    finally:
        shutil.rmtree(folder)
    rows = [row_of(kind, measured, options.sequences) for kind in kinds]
    print(table(list(asdict(rows[0])), [list(asdict(row).values()) for row in rows]))
    figures = {
        "model": asdict(shape),
        "dtype": options.dtype,
        "sequences": options.sequences,
        "requests": options.requests,
        "rounds": options.rounds,
        "params": {kind.name: kind.params for kind in kinds},
        "rows": [asdict(row) for row in rows],
    }
    label = "request_kinds" if options.kinds is None else f"request_kinds_{'_'.join(options.kinds)}_{options.sequences}"
    write_result(options.out / f"{label}.json", "request_kinds", figures)


def section_of(document: Document) -> Section:
    rows: list[ResultRow] = document["rows"]
    headlines = []
    for row in rows:
        if row["least"] is not None:
            percent, least = round(100 * row["ratio"], 2), round(100 * row["least"], 2)
            figure = f"{row['kind']}: {number(percent, 1, least)} % of plain greedy requests' tokens/s"
            worst, best = (round(100 * row[key], 2) for key in ("worst_ratio", "best_ratio"))
            headlines.append(Headline(figure, [at_least_in_rounds(worst, best, least, "%", document["rounds"])]))
    cells = [
        (
            row["kind"],
            _words_of(document["params"][row["kind"]]),
            f"{row['tokens_per_s']:,.1f}",
            *(f"{100 * row[key]:.1f}" for key in ("ratio", "worst_ratio", "best_ratio")),
        )
        for row in rows
    ]
    is_whole = len(rows) == len(KINDS)
    names = ", ".join(row["kind"] for row in rows[1:])
    return Section(
        variant="" if is_whole else f"{names}, {document['sequences']} at once",
        done=(
            f"One deployment on a CPU with a random model in {document['dtype']}, vocabulary "
            f"{document['model']['vocab_size']:,}, {document['sequences']} sequences at once; {document['requests']} "
            f"requests of Alpaca's lengths a run, kinds in turn, {document['rounds']} rounds, medians of the ratio "
            "within a round; a target is met, or not, where all rounds say so. Of a beam search the tokens of each "
            "beam count."
        ),
        headlines=headlines,
        blocks=[grid(("kind", "parameters", "tokens/s", "% of greedy", "worst round", "best"), cells)],
        versions=("torch", "grpcio"),
    )


def _words_of(params: dict[str, Any]) -> str:
    short = {name: _short(value) for name, value in params.items()}
    return ", ".join(f"{name} {value}" for name, value in short.items())


def _short(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return "of records" if "type" in value else f"{len(value)} ids"


SECTION = PageSection(
    kinds=("request_kinds",),
    title="Kinds of requests",
    question="What do sampling, penalties, log-probabilities and beams cost beside greedy requests?",
    command="python -m benchmarks.cpu.request_kinds",
    measures=SERVICES,
    target="≥ 95 % of greedy, 93 % with log-probabilities, 50 % for beams of 4",
    render=section_of,
)


if __name__ == "__main__":
    main()
