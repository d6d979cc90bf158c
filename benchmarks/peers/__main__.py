"""Quire against its peers on this machine's CPU: one model, the same requests, round by round. Table, JSON, plots.

    python -m benchmarks.peers [--model 125m] [--dtype bfloat16] [--only NAMES] [--loads NAMES] [--rounds 5] [--resume]
    python -m benchmarks.peers --http       # servers, asked over HTTP
    python -m benchmarks.peers --chats      # conversations of several turns, with prefix caches on
    python -m benchmarks.peers --set-up     # makes the environments, and measures nothing

Each peer has a virtual environment under the cache folder; what cannot be set up is reported with its reason. An
interrupted campaign goes on with --resume.
"""

import argparse
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.campaign import Campaign, Entrant
from benchmarks.peers.environments import SetUpError, install_with_pip, our_python, python_of, variables_in
from benchmarks.peers.peer_process import PeerProcess
from benchmarks.peers.rendering import Outcome
from benchmarks.peers.runners.harness import Setup
from benchmarks.peers.runs_file import RunsFile
from benchmarks.peers.systems import (
    CHATTING,
    CLOSED,
    DRAWING,
    ENVIRONMENT,
    OFFLINE,
    OPEN_LOOP,
    PARITY,
    POOL_BYTES,
    POOL_TOKENS,
    RECIPES,
    SERVERS,
    SYSTEMS,
    System,
    targets_of,
)
from benchmarks.peers.workload import CHATS, LOADS, MODELS, NUM_REQUESTS, checkpoint, longest_sequence
from benchmarks.random_models import ModelShape
from benchmarks.report import RESULTS, ROOT, circumstances, has_amx, write_result

STEP_TOKENS = 2_048  # of every peer that takes a budget, the default of vLLM and llama.cpp; ours is our default
USUAL = [name for name, system in SYSTEMS.items() if not system.is_extra]
_ITEM_BYTES = {"bfloat16": 2, "float32": 4}
_LEN_STEP = 64


def main() -> None:
    """Reads the command line, sets up, measures."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a runner and its services end with us
    options = parse_arguments()
    pythons, not_set_up = set_up(options)
    for name, reason in not_set_up.items():
        print(f"{SYSTEMS[name].title} cannot be set up: {reason}", flush=True)
    if options.set_up:
        return
    rounds = {load: options.rounds if load in CLOSED else options.open_rounds for load in options.loads}
    rounds |= {PARITY: 1} if PARITY in rounds else {}
    entrants = entrants_of(pythons, options)
    plan = {
        "model": options.model,
        "dtype": options.dtype,
        "systems": {each.name: [asdict(SYSTEMS[each.name]), asdict(each.setup)] for each in entrants},
        "loads": {load: asdict(LOADS[load]) for load in options.loads},
        "recipes": {name: asdict(recipe) for name, recipe in RECIPES.items()},
    }
    kind = "amx_" if has_amx(circumstances()["machine"]) else ""  # such machines have results of their own
    label = f"peers_{kind}{options.model}_{options.dtype}{'' if options.top_p is None else '_top_p'}"
    label += f"{'_http' if options.http else ''}{'_chats' if options.chats else ''}"
    runs = RunsFile(options.cache / "runs" / f"{label}.jsonl", plan, resume=options.resume)
    campaign = Campaign(
        entrants=entrants,
        loads=LOADS,
        rounds=rounds,
        vocab_size=MODELS[options.model].vocab_size,
        runs=runs,
        tell=lambda line: print(line, flush=True),
    )
    campaign.run()
    about = {run.system: run.about for run in runs.runs.values() if run.about is not None}
    outcome = Outcome(
        list(runs.runs.values()), not_set_up, options.top_p, over_http=options.http, in_chats=options.chats
    )
    print(outcome.as_text(options.loads))
    figures = {
        "model": options.model,
        "shape": asdict(MODELS[options.model]),
        "dtype": options.dtype,
        "top_p": options.top_p,
        "over_http": options.http,
        "in_chats": options.chats,
        "threads": options.threads,
        "rounds": rounds,
        "pool_tokens": POOL_TOKENS,
        "step_tokens": STEP_TOKENS,
        "loads": _loads_in_words(options.loads, MODELS[options.model].vocab_size),
        "peers": {name: _peer_in_words(system, about.get(name)) for name, system in SYSTEMS.items()},
        **outcome.as_json(options.loads),
    }
    write_result(options.out / f"{label}.json", "peers", figures)
    for name, document in outcome.charts(f"{options.model}, {options.dtype}", options.loads).items():
        (options.out / f"{label}_{name}.svg").write_text(document)


def set_up(options: argparse.Namespace) -> tuple[dict[str, Path], dict[str, str]]:
    """Set up environments; return the systems' Pythons, and the reasons of failures."""
    pythons, reasons = {}, {}
    install = partial(install_with_pip, torch_index=options.torch_index)
    for name in options.only:
        recipe = SYSTEMS[name].recipe
        try:
            python = our_python() if recipe is None else python_of(recipe, RECIPES[recipe], options.cache, install)
            variables_in(SYSTEMS[name].variables, python, ENVIRONMENT)
            pythons[name] = python
        except SetUpError as error:
            reasons[name] = str(error)
    return pythons, reasons


def entrants_of(pythons: Mapping[str, Path], options: argparse.Namespace) -> list[Entrant]:
    shape = MODELS[options.model]
    model = checkpoint(options.model, options.dtype, options.cache / "models")
    longest = max(longest_sequence(LOADS[load].requests(shape.vocab_size)) for load in options.loads)
    entrants = []
    for name, python in pythons.items():
        system = SYSTEMS[name]
        setup = Setup(
            model=str(model),
            cache=str(model),
            dtype=options.dtype,
            threads=options.threads,
            max_num_seqs=NUM_REQUESTS,
            pool_tokens=POOL_TOKENS,
            step_tokens=STEP_TOKENS,
            max_len=-(-longest // _LEN_STEP) * _LEN_STEP,
            top_p=options.top_p,
            caches_prefixes=options.chats,
            options=_with_pool(system.options, shape, options.dtype),
        )
        command = [str(python), "-m", f"benchmarks.peers.runners.{system.runner}"]
        loads = [load for load in options.loads if load in system.loads]
        entrants.append(
            Entrant(
                name=name,
                start=_starter(command, variables_in(system.variables, python, ENVIRONMENT)),
                setup=setup,
                loads=loads,
            )
        )
    return entrants


def _starter(command: Sequence[str], variables: Mapping[str, str]) -> Callable[[], PeerProcess]:
    return lambda: PeerProcess(command, {"HF_HUB_OFFLINE": "1", **variables})


def _with_pool(options: Mapping[str, Any], shape: ModelShape, dtype: str) -> dict[str, Any]:
    """Replace POOL_BYTES in the options by the bytes of the pool's tokens."""
    num_bytes = POOL_TOKENS * shape.kv_values_per_token * _ITEM_BYTES[dtype]
    return {name: num_bytes if value == POOL_BYTES else value for name, value in options.items()}


def _peer_in_words(system: System, loaded: Mapping[str, Any] | None) -> dict[str, Any]:
    """Describe a peer. `loaded`: its own report, if it ran."""
    about = {"versions": loaded["versions"], "computes_in": loaded["computes_in"]} if loaded is not None else {}
    return {"title": system.title, "variables": dict(system.variables), **about}


def _loads_in_words(loads: Sequence[str], vocab_size: int) -> dict[str, Any]:
    words = {}
    for name in loads:
        requests = LOADS[name].requests(vocab_size)
        words[name] = {
            **asdict(LOADS[name]),
            "prompt_tokens": sum(len(each.prompt) for each in requests),
            "output_tokens": sum(each.num_output for each in requests),
        }
    return words


def parse_arguments() -> argparse.Namespace:
    """Defaults are those of the targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="125m")
    parser.add_argument("--dtype", choices=_ITEM_BYTES, default="bfloat16")
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, metavar="SYSTEM", help="default: all but a few")
    parser.add_argument("--http", action="store_true", help="compare servers, asked over HTTP")
    parser.add_argument("--chats", action="store_true", help="compare conversations, with prefix caches on")
    parser.add_argument("--loads", nargs="+", choices=LOADS, help="default: all, parity in float32 alone")
    parser.add_argument("--rounds", type=int, default=5, help="of the loads that come all at once")
    parser.add_argument("--open-rounds", type=int, default=3, help="of the loads that come one by one")
    parser.add_argument("--top-p", type=float, help="draw all tokens so, where a system can; default: greedy choice")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--resume", action="store_true", help="keep the runs of the same plan, commit and machine that have ended"
    )
    parser.add_argument("--set-up", action="store_true", help="make the environments, and no more")
    parser.add_argument("--cache", type=Path, default=ROOT / ".quire" / "peers", help="environments, models, runs")
    parser.add_argument("--torch-index", help="where torch comes from; default: pip's own configuration")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    options.only = options.only or list(SERVERS if options.http else CHATTING if options.chats else USUAL)
    if any(SYSTEMS[name].is_server != options.http for name in options.only):
        parser.error("name servers with --http, and engines without")
    if options.chats and not set(options.only) <= set(CHATTING):
        parser.error(f"--chats is known for {', '.join(CHATTING)}: name them with --only")
    usual = [CHATS] if options.chats else [*OFFLINE, *OPEN_LOOP, *([PARITY] if options.dtype == "float32" else [])]
    options.loads = options.loads or usual
    if options.chats != (CHATS in options.loads) or (options.chats and len(options.loads) > 1):
        parser.error(f"the load {CHATS} runs by itself, with --chats")
    options.cache = options.cache.resolve()
    if options.http:
        options.loads = [load for load in options.loads if load in targets_of(None, over_http=True)]
    if options.top_p is not None and not set(options.only) <= DRAWING:
        parser.error(f"--top-p is known for {', '.join(sorted(DRAWING))}: name them with --only")
    return options


if __name__ == "__main__":
    main()
