"""EleutherAI's harness on the demo model: through the gateway, and with the model in its own process; equal scores.

    python -m tests.evaluation [--items 100] [--seed 1] [--record]

`local-completions` and `local-chat-completions` against the gateway, `hf` in process: multiple choice, perplexity of
whole texts, generation. Nothing is downloaded. Prints each score beside the other, and ends with status 1 if a score or
a generated text differs. `--record` keeps the result among those of the benchmarks.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.report import RESULTS, table, write_result
from tests.evaluation.scores import LOGPROB_TOLERANCE, RELATIVE_TOLERANCE, Comparison, Scores, compare, read_scores
from tests.evaluation.task_data import write_data
from tests.services import DEMO_MODEL, running_services

TASKS = Path(__file__).parent / "tasks"
_PLAIN = ("quire_choices", "quire_stories", "quire_continuations")
_CHAT = ("quire_answers",)
_MODEL = "demo"
_MOST_S = 900.0


def main() -> None:
    """Start the services, run the harness four times, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=100, help="of each task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="write the result")
    parser.add_argument("--output", type=Path, default=RESULTS / "evaluation.json", help="where")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder, options.items, options.seed)
        with running_services("--dtype", "float32", "--num-blocks", "2000", "--model-name", _MODEL) as services:
            comparisons = compare_all(folder, services.url)
    print(_text(comparisons), flush=True)  # noqa: T201
    if options.record:
        figures = {
            "seed": options.seed,
            "relative_tolerance": RELATIVE_TOLERANCE,
            "logprob_tolerance": LOGPROB_TOLERANCE,
            "tasks": [{**asdict(each), "is_equal": each.is_equal} for each in comparisons],
        }
        write_result(options.output, "evaluation", figures)
    sys.exit(0 if all(map(is_met, comparisons)) else 1)


def is_met(comparison: Comparison) -> bool:
    """True if scores, texts and log-likelihoods are equal."""
    has_equal_texts = comparison.num_equal_texts in (None, comparison.num_items)
    difference = comparison.greatest_difference
    return comparison.is_equal and has_equal_texts and (difference is None or difference <= LOGPROB_TOLERANCE)


def compare_all(folder: Path, url: str) -> list[Comparison]:
    """Compare each task."""
    tokenizer = {"tokenizer": str(DEMO_MODEL), "add_bos_token": True}
    local = {"model": _MODEL, **tokenizer, "num_concurrent": 1, "max_retries": 1}
    in_process = {"pretrained": str(DEMO_MODEL), "dtype": "float32", "add_bos_token": True}
    completions = {**local, "base_url": f"{url}/v1/completions", "tokenizer_backend": "huggingface"}
    chats = {**local, "base_url": f"{url}/v1/chat/completions"}
    runs: list[tuple[str, Mapping[str, object], Sequence[str], tuple[str, ...]]] = [
        ("local-completions", completions, _PLAIN, ()),
        ("local-chat-completions", chats, _CHAT, ("--apply_chat_template",)),
    ]
    found = []
    for api, arguments, tasks, options in runs:
        served = _run(folder, api, arguments, tasks, options)
        reference = _run(folder, "hf", in_process, tasks, ("--device", "cpu", *options))
        found += [compare(task, api, served[task], reference[task]) for task in tasks]
    return found


def _run(
    folder: Path, model: str, arguments: Mapping[str, object], tasks: Sequence[str], options: Sequence[str]
) -> dict[str, Scores]:
    """Scores by task, of one run of the harness in a folder with the tasks' data, without a network."""
    output = folder / f"{model}_{tasks[0]}"
    given = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", model, "--model_args", given, "--tasks", ",".join(tasks)),
        *("--include_path", str(TASKS), "--output_path", str(output), "--log_samples", "--batch_size", "1", *options),
    ]
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    env = {**os.environ, **offline, "HF_HOME": str(folder / "cache"), "OPENAI_API_KEY": "none"}
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=_MOST_S, check=False)
    if ended.returncode != 0:
        raise RuntimeError(f"lm_eval with {model} failed:\n{ended.stderr[-4000:]}")
    return read_scores(output)


def _text(comparisons: Sequence[Comparison]) -> str:
    rows = [
        (each.task, each.api, name, f"{value:.10g}", f"{each.in_process[name]:.10g}")
        for each in comparisons
        for name, value in each.served.items()
    ]
    lines = [table(("task", "API", "score", "gateway", "hf"), rows)]
    for each in comparisons:
        texts = "" if each.num_equal_texts is None else f", {each.num_equal_texts} of {each.num_items} texts equal"
        far = "" if each.greatest_difference is None else f", log-likelihoods differ by {each.greatest_difference:.2g}"
        lines.append(f"{each.task}: {'equal' if is_met(each) else 'NOT EQUAL'}{texts}{far}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
