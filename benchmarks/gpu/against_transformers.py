"""Speed beside the continuous batching of `transformers`: the same model, requests and device, in one run.

The requests have the lengths of the paper's ShareGPT trace and are sent all at once; a random model of 8 B parameters
answers them, first behind our services (scheduler, journal, wire and SDK included), then in `transformers` alone.
Prints a table and writes JSON.

    python -m benchmarks.gpu.against_transformers [--model FOLDER] [--requests N] [--limit-s S] [--out DIR]
    python -m benchmarks.gpu.against_transformers --device cpu --small    # the demo model: a smoke test
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import uvloop

from benchmarks.gpu.decode_step import DEMO_MODEL, model_folder
from benchmarks.gpu.length_load import LoadOutcome, LoadRequest, requests_of, run_load
from benchmarks.page_section import GPU_WORKER, Document, Headline, PageSection, Section, at_least, grid, number
from benchmarks.random_models import SHAPES, ModelShape, default_device
from benchmarks.report import RESULTS, ROOT, table, write_result
from benchmarks.services.model_services import SMOKE_TEST, Deployment, Site, serving

TARGET_RATIO = 2.0
_LOADING_S = 180.0  # of `transformers`, beside the load itself
_SMALL_LEN = 24
_SMALL_BLOCKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side. If its load did not end in time the figures are bounds: it was slower than they say."""

    tokens_per_s: float
    seconds: float
    normalised_latency_ms: float | None  # mean over requests of latency / output tokens; None: not all ended
    num_ended: int
    is_bound: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings that both sides share."""

    model: Path
    device: str
    dtype: str
    requests: Sequence[LoadRequest]
    limit_s: float  # for `transformers`
    is_small: bool


def measure_ours(plan: Plan) -> tuple[Side, Site]:
    deployment = Deployment(model=plan.model, device=plan.device, dtype=plan.dtype)
    with serving(deployment) as site:
        outcome = uvloop.run(run_load(site.address, plan.requests))
    return side_of(outcome), site


def measure_transformers(plan: Plan) -> tuple[Side, dict[str, Any]]:
    """Measure `transformers` in its own process; the second value is its report. Raises RuntimeError if it failed."""
    with tempfile.TemporaryDirectory(prefix="quire-transformers-") as folder:
        requests, output = Path(folder) / "requests.json", Path(folder) / "output.json"
        requests.write_text(json.dumps([[each.prompt, each.num_output] for each in plan.requests]))
        command = [sys.executable, "-m", "benchmarks.gpu.transformers_batching", str(requests), str(output)]
        command += ["--model", str(plan.model), "--device", plan.device, "--dtype", plan.dtype]
        command += ["--limit-s", str(plan.limit_s), *(["--num-blocks", str(_SMALL_BLOCKS)] if plan.is_small else [])]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=2 * plan.limit_s + _LOADING_S, check=False
        )
        if done.returncode or not output.is_file():
            raise RuntimeError(f"transformers did not run:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        result = json.loads(output.read_text())
    if result["error"] is not None:
        raise RuntimeError(f"transformers failed: {result['error']}")
    return transformers_side(plan.requests, result["ends_s"], result["seconds"]), result


def side_of(outcome: LoadOutcome) -> Side:
    """Summarise a load that ended."""
    return Side(
        tokens_per_s=round(outcome.tokens_per_s, 1),
        seconds=round(outcome.seconds, 2),
        normalised_latency_ms=round(1e3 * outcome.normalised_latency_s, 3),
        num_ended=outcome.num_requests,
    )


def transformers_side(requests: Sequence[LoadRequest], ends_s: Sequence[float | None], seconds: float) -> Side:
    """Summarise `ends_s` of the requests. If some did not end, all tokens / all the time is more than it reached."""
    num_outputs = [each.num_output for each in requests]
    ended = [end for end in ends_s if end is not None]
    if len(ended) == len(requests):
        return side_of(
            LoadOutcome(
                num_requests=len(requests),
                output_tokens=sum(num_outputs),
                seconds=max(ended),
                latencies_s=ended,
                num_outputs=num_outputs,
            )
        )
    return Side(
        tokens_per_s=round(sum(num_outputs) / seconds, 1),
        seconds=round(seconds, 2),
        normalised_latency_ms=None,
        num_ended=len(ended),
        is_bound=True,
    )


def main() -> None:
    """Reads the command line and measures."""
    options = parse_arguments()
    with model_folder(DEMO_MODEL if options.small else options.model, options.shape, options.device) as model:
        shape = ModelShape.of(model)
        max_len = _SMALL_LEN if options.small else None
        plan = Plan(
            model=model,
            device=str(options.device),
            dtype="float32" if options.small else "bfloat16",
            requests=requests_of("sharegpt", 6 if options.small else options.requests, shape.vocab_size, max_len),
            limit_s=options.limit_s,
            is_small=options.small,
        )
        ours, site = measure_ours(plan)
        print(f"ours: {ours}", flush=True)
        theirs, about = measure_transformers(plan)
    ratio = round(ours.tokens_per_s / theirs.tokens_per_s, 3)
    report(ours, theirs, ratio)
    if options.small:
        print(SMOKE_TEST)
    figures = {
        "key_figures": {
            "our_tokens_per_s": ours.tokens_per_s,
            "transformers_tokens_per_s": theirs.tokens_per_s,
            "times_transformers": ratio,
            "is_bound": theirs.is_bound,
        },
        "target": {"ratio": TARGET_RATIO, "met": ratio >= TARGET_RATIO},
        "is_smoke_test": options.small,
        "lengths": "sharegpt",
        "num_requests": len(plan.requests),
        "prompt_tokens": sum(len(each.prompt) for each in plan.requests),
        "output_tokens": sum(each.num_output for each in plan.requests),
        "dtype": plan.dtype,
        "shape": asdict(shape),
        "ours": asdict(ours),
        "transformers": {**asdict(theirs), "attention": about["attention"]},
        "worker": site.worker,
    }
    write_result(options.out / "against_transformers.json", "against_transformers", figures)


def report(ours: Side, theirs: Side, ratio: float) -> None:
    rows = [
        (
            name,
            f"{'< ' if side.is_bound else ''}{side.tokens_per_s}",
            "-" if side.normalised_latency_ms is None else side.normalised_latency_ms,
            f"{'> ' if side.is_bound else ''}{side.seconds}",
            side.num_ended,
        )
        for name, side in (("Quire", ours), ("transformers", theirs))
    ]
    print(table(("", "output tokens/s", "ms a token, p. request", "seconds", "requests ended"), rows))
    more = "more than " if theirs.is_bound else ""
    verdict = "target met" if ratio >= TARGET_RATIO else "target NOT met"
    print(f"{more}{ratio} x transformers; target {TARGET_RATIO} x: {verdict}")


def parse_arguments() -> argparse.Namespace:
    """Defaults are those of the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=default_device(), help="default: what there is")
    parser.add_argument("--small", action="store_true", help="demo model and few short requests: a smoke test")
    parser.add_argument("--model", type=Path, help="a LLaMA checkpoint; default: a random one of --shape")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--limit-s", type=float, default=120.0, help="transformers is given up after so long")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    return parser.parse_args()


def section_of(document: Document) -> Section:
    """Section of the results page."""
    ours, theirs, target = document["ours"], document["transformers"], document["target"]["ratio"]
    times = document["key_figures"]["times_transformers"]
    least = "at least " if document["key_figures"]["is_bound"] else ""
    return Section(
        done=(
            f"{document['num_requests']} requests with the lengths of ShareGPT, all there from the beginning, on the "
            f"same random model of LLaMA 3's 8 B shape in {document['dtype']}: through our services, and by the "
            f"continuous batching of `transformers` (`{theirs['attention']}`) without any."
        ),
        headlines=[
            Headline(
                f"{least}{number(times, 2, target)} × the tokens a second of `transformers`",
                [at_least(times, target, "×")],
            )
        ],
        blocks=[
            grid(
                ("", "tokens a second", "requests ended", "seconds"),
                [
                    (name, f"{each['tokens_per_s']:,.0f}", each["num_ended"], each["seconds"])
                    for name, each in (("Quire", ours), ("`transformers`", theirs))
                ],
            )
        ],
        versions=("torch", "triton", "transformers"),
    )


SECTION = PageSection(
    kinds=("against_transformers",),
    title="Against transformers on a GPU",
    question="How many tokens a second, against `transformers`' continuous batching?",
    command="python -m benchmarks.gpu.against_transformers --out DIR",
    measures=GPU_WORKER,
    target="≥ 2 ×",
    render=section_of,
)


if __name__ == "__main__":
    main()
