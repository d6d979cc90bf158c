"""Writes a checkpoint as OpenVINO GenAI reads it, weights in the given precision.

    python -m benchmarks.peers.runners.openvino_convert MODEL FOLDER bf16|f32

optimum-intel does the work. Of the tokenizer nothing is converted: prompts are token ids, and answers stay so.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from optimum.exporters.openvino import export_from_model
from transformers import AutoModelForCausalLM

_TYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def main() -> None:
    """Reads the command line and converts."""
    model, folder, precision = sys.argv[1:]
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=_TYPES[precision])
    export_from_model(
        loaded,
        Path(folder),
        task="text-generation-with-past",
        stateful=True,
        patch_16bit_model=loaded.dtype != torch.float32,
    )


if __name__ == "__main__":
    main()
