"""Requests run by the continuous batching of `transformers`, in a process of its own. Writes what came of them.

    python -m benchmarks.gpu.transformers_batching REQUESTS OUTPUT --model FOLDER --device cuda --dtype bfloat16

REQUESTS is JSON: a list of [prompt token ids, number of output tokens]. It uses a flash attention that is installed
(none is fetched), else its paged SDPA. What does not end within --limit-s is given up: the load took longer than that.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

_WARM_UP_TOKENS = 2
_WARM_UP_S = 60.0
_NO_FETCHING = "auto_switch_to_flash"
_CONFIG_FIELDS = frozenset(each.name for each in dataclasses.fields(ContinuousBatchingConfig))


def attention() -> str:
    """Fastest attention that is installed; nothing is downloaded."""
    if is_flash_attn_3_available():
        return "flash_attention_3"
    if is_flash_attn_2_available():
        return "flash_attention_2"
    # Before it could be told not to, `transformers` looked for a flash attention to fetch unless paging was asked for.
    return "sdpa" if _NO_FETCHING in _CONFIG_FIELDS else "paged|sdpa"


def run(options: argparse.Namespace) -> NoReturn:
    """Writes the seconds from the first submission to each request's end; None for those that did not end in time."""
    requests: list[tuple[list[int], int]] = json.loads(options.requests.read_text())
    implementation = attention()
    model: Any = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), attn_implementation=implementation
    )
    model.to(options.device).eval()
    untyped: Any = GenerationConfig
    generation = untyped(do_sample=False, max_new_tokens=max(number for _, number in requests))
    generation.eos_token_id = -1  # nothing ends before its length
    generation.pad_token_id = 0
    ends_s: dict[str, float] = {}
    with model.continuous_batching_context_manager(
        generation_config=generation,
        continuous_batching_config=batching_config(options),
        workload_hints=WorkloadHints(
            max_prompt_length=max(len(prompt) for prompt, _ in requests),
            max_generated_length=generation.max_new_tokens,
            num_requests=len(requests),
        ),
    ) as manager:
        warm_up: dict[str, float] = {}
        error = _run_requests(manager, [(requests[0][0], _WARM_UP_TOKENS)], warm_up, _WARM_UP_S, "warm-up")
        if not warm_up:
            raise SystemExit(f"the first request did not end: {error or f'not within {_WARM_UP_S} s'}")
        began_s = time.perf_counter()
        error = _run_requests(manager, requests, ends_s, options.limit_s, "request")
        seconds = time.perf_counter() - began_s
        result = {
            "attention": implementation,
            "seconds": seconds,
            "ends_s": [ends_s.get(f"request {index}") for index in range(len(requests))],
            "error": error,
        }
        options.output.write_text(json.dumps(result))
        sys.stdout.flush()
        os._exit(0)  # here, as a generation that was given up would be waited for


def batching_config(options: argparse.Namespace) -> ContinuousBatchingConfig:
    """Default configuration of `transformers`, which reads the free memory; only downloads are switched off."""
    wanted: dict[str, Any] = {_NO_FETCHING: False, "allow_block_sharing": False}
    if options.num_blocks is not None:
        wanted |= {"num_blocks": options.num_blocks, "max_batch_tokens": 256}
    return ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in _CONFIG_FIELDS})


def _run_requests(
    manager: Any, requests: list[tuple[list[int], int]], ends_s: dict[str, float], limit_s: float, name: str
) -> str | None:
    """Fill in `ends_s`; return the failures."""
    began_s = time.perf_counter()
    for index, (prompt, num_output) in enumerate(requests):
        manager.add_request(prompt, request_id=f"{name} {index}", max_new_tokens=num_output, eos_token_id=-1)
    while len(ends_s) < len(requests):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None:
                return str(result.error)
            ends_s[result.request_id] = time.perf_counter() - began_s
        elif result is None and not manager.is_running():
            return "its generation thread ended"
        if time.perf_counter() - began_s > limit_s:
            return None
    return None


def main() -> None:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--num-blocks", type=int, help="of its cache; default: what fits")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
