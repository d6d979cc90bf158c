"""Attention libraries beside our kernels, as a worker's start measures them: who attends fastest, and is it right?

Times the passes that `--attention auto` compares, for heads of an 8 B model, and checks each result against the torch
reference. A library that is not installed, or does not compute this on the device, has a row that says so. On a CPU
nothing is compared but the paths of our own operations.

    python -m benchmarks.gpu.attention_libraries --out DIR [--device cuda|cpu] [--small]
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device_time import device_name
from benchmarks.gpu.random_decoder import random_decoder
from benchmarks.page_section import GPU_WORKER, PageSection
from benchmarks.random_models import ModelShape, default_device
from benchmarks.report import table, write_result
from worker_svc.gpu import torch_operations
from worker_svc.gpu.libraries.library import AttentionLibrary
from worker_svc.model.decoder import Decoder
from worker_svc.operations import Operations
from worker_svc.option_check import installed_attention
from worker_svc.runner_choice import RunnerChoice
from worker_svc.start.attention_choice import OWN, Measure, usable_libraries
from worker_svc.start.attention_libraries import LIBRARY_NAMES, LibraryError, load_library
from worker_svc.start.attention_trial import (
    AttentionTrial,
    GraphClock,
    Launch,
    LaunchClock,
    Trial,
    TrialSize,
    results_agree,
)
from worker_svc.start.device_kernels import operations_for

HEADS = ModelShape(
    hidden_size=4096,
    num_layers=4,
    num_heads=32,
    num_kv_heads=8,
    intermediate_size=256,
    vocab_size=256,
    max_model_len=4096,
)
SMALL_HEADS = ModelShape(
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=32,
    vocab_size=64,
    max_model_len=64,
)
CUDA_SIZE, CPU_SIZE = TrialSize(64, 2048, 1024), TrialSize(3, 40, 16)
_BLOCK_SIZE = 16
_FAULT_CHARACTERS = 300


class SingleLaunch:
    """Clock of a launch that may wait for its device, such as the reference's: launches it once."""

    def launch_us(self, launch: Launch) -> float:
        """See LaunchClock.launch_us."""
        began_s = time.perf_counter()
        launch()
        return (time.perf_counter() - began_s) * 1e6


class Lab:
    """Trials of the same passes by the reference, our kernels and libraries."""

    def __init__(self, decoder: Decoder, operations: Operations, size: TrialSize, clock: LaunchClock) -> None:
        shape = decoder.block_shape(_BLOCK_SIZE)
        self._reference = AttentionTrial(decoder, shape, torch_operations.OPERATIONS, size)
        self._ours = AttentionTrial(decoder, shape, operations, size)
        self._decoder, self._clock = decoder, clock

    def rows(self) -> Iterator[dict[str, Any]]:
        """Measure everyone on both kinds of pass."""
        kinds = (
            ("decode", self._reference.decode, self._ours.decode),
            ("mixed", self._reference.mixed, self._ours.mixed),
        )
        libraries = {name: self._library(name) for name in LIBRARY_NAMES}
        for kind, by_reference, measure in kinds:
            expected = by_reference(None, SingleLaunch())
            yield {"pass": kind, "by": OWN, **_facts(measure(None, self._clock), expected)}
            for name, found in libraries.items():
                yield {"pass": kind, "by": name, **self._measured(found, kind, measure, expected)}

    def _library(self, name: str) -> AttentionLibrary | str:
        """The library; a reason if it cannot be used here."""
        if name not in installed_attention():
            return "not installed"
        if self._decoder.device.type != "cuda":
            return "no CUDA device"
        try:
            return load_library(name)
        except LibraryError as error:
            return str(error)[:_FAULT_CHARACTERS]

    def _measured(
        self, library: AttentionLibrary | str, kind: str, measure: Measure, expected: Trial
    ) -> dict[str, Any]:
        if isinstance(library, str):
            return {"not_measured": library}
        capability = torch.cuda.get_device_capability(self._decoder.device)
        dtype = self._decoder.dtype
        usable = usable_libraries([library], self._decoder.config, dtype, dtype, capability)
        if library not in getattr(usable, kind):
            return {"not_measured": "not for this device or these heads: the log says why"}
        try:
            return _facts(measure(library, self._clock), expected)
        except Exception as error:  # another project's code: whatever it raises ends its row, not the run
            return {"not_measured": f"failed: {type(error).__name__}: {error}"[:_FAULT_CHARACTERS]}


def _facts(trial: Trial, expected: Trial) -> dict[str, Any]:
    return {"us": round(trial.us, 1), "is_right": results_agree(expected.out, trial.out)}


def lab_for(device: torch.device, *, small: bool) -> Lab:
    """The lab on a device; small, with the torch references instead of our kernels, on a CPU."""
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    decoder = random_decoder(SMALL_HEADS if small else HEADS, dtype, device)
    clock = GraphClock(device) if device.type == "cuda" else SingleLaunch()
    operations = operations_for(RunnerChoice(kind="device", device=device, kv_dtype=None))
    return Lab(decoder, operations, CPU_SIZE if small else CUDA_SIZE, clock)


def main() -> int:
    """Reads the command line and measures; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=default_device(), help="default: what there is")
    parser.add_argument("--small", action="store_true", help="a smoke test, whose times mean nothing")
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    options = parser.parse_args()
    with torch.inference_mode():
        rows = list(lab_for(options.device, small=options.small).rows())
    head = ("pass", "by", "us", "is_right", "not_measured")
    print(device_name(options.device))
    print(table(head, ([row.get(name, "") for name in head] for row in rows)))
    result = {"device": device_name(options.device), "is_smoke_test": options.small, "rows": rows}
    key_figures = {f"{row['pass']}, {row['by']}": row.get("us", row.get("not_measured")) for row in rows}
    write_result(
        options.out / "attention_libraries.json", "attention_libraries", {"key_figures": key_figures, **result}
    )
    return int(not all(row.get("is_right", True) for row in rows))


SECTION = PageSection(
    kinds=("attention_libraries",),
    title="Attention libraries on a GPU",
    question="Who attends fastest, our kernels, FlashInfer or FlashAttention-3?",
    command="python -m benchmarks.gpu.attention_libraries --out DIR",
    measures=GPU_WORKER,
)


if __name__ == "__main__":
    sys.exit(main())
