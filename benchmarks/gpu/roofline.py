"""The roofline of a device, measured: how fast it reads memory and multiplies matrices, and the least time of a work.

    python -m benchmarks.gpu.roofline --out DIR [--device cuda|cpu]

The first stage of `gpu_check`, since all later figures are shares of these rates. Knows no model.
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.gpu.device_time import device_name, median_seconds
from benchmarks.gpu.read_ceiling import read_bandwidth
from benchmarks.page_section import Document, Headline, PageSection, Section
from benchmarks.random_models import default_device
from benchmarks.report import write_result

_CUDA_SIZE, _CPU_SIZE = 8192, 512
_REPEATS = 15


class Work(NamedTuple):
    """Part of a step that runs by itself."""

    num_bytes: float  # read
    flop: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """Rates that a device reaches."""

    bytes_per_s: float
    flop_per_s: float

    def floor_s(self, parts: Iterable[Work]) -> float:
        """Least time of parts that run one after another: of each the longer one of reading and computing."""
        return sum(max(part.num_bytes / self.bytes_per_s, part.flop / self.flop_per_s) for part in parts)


def measure_roofline(device: torch.device) -> Roofline:
    """Measure both rates; the memory it took is another process's again when it returns."""
    roofline = Roofline(read_bandwidth(device), product_rate(device))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return roofline


def product_rate(device: torch.device) -> float:
    """Operations a second of a large product: in bfloat16 on a GPU, in float32 on a CPU."""
    size, dtype = (_CUDA_SIZE, torch.bfloat16) if device.type == "cuda" else (_CPU_SIZE, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / median_seconds(device, lambda: torch.matmul(a, b, out=out), _REPEATS)


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=default_device(), help="default: what there is")
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    options = parser.parse_args()
    roofline = measure_roofline(options.device)
    figures = {
        "read_gb_per_s": round(roofline.bytes_per_s / 1e9, 1),
        "product_tflop_per_s": round(roofline.flop_per_s / 1e12, 2),
    }
    print(f"{device_name(options.device)}: {figures}")
    write_result(options.out / "roofline.json", "roofline", {"key_figures": figures})


def section_of(document: Document) -> Section:
    """Section of the results page."""
    figures = document["key_figures"]
    return Section(
        done="Large sums in float32 and products of large square matrices in bfloat16, the best of several shapes.",
        headlines=[
            Headline(f"reads {figures['read_gb_per_s']:,.0f} GB/s"),
            Headline(f"multiplies matrices of bfloat16 at {figures['product_tflop_per_s']:,.0f} TFLOP/s"),
        ],
        blocks=[],
        versions=("torch", "triton"),
    )


SECTION = PageSection(
    kinds=("roofline",),
    title="Roofline of a GPU",
    question="How fast does the device read memory and multiply matrices?",
    command="python -m benchmarks.gpu.roofline --out DIR",
    measures=("benchmarks/gpu/roofline.py", "benchmarks/gpu/read_ceiling.py"),
    render=section_of,
)


if __name__ == "__main__":
    main()
