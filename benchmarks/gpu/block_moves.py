"""Speed of copies and swaps at block sizes 1 to 256: the kernels against one contiguous copy.

Blocks are those of an 8B LLaMA (128 KiB a token), scattered at random in both pools; every block size moves the same
bytes. Beside ours stands the paper's layout, where a block lies layer by layer and every piece is a copy of its own.
Needs a GPU; `--device cpu --small` runs the same code in small, and its figures mean nothing.

    python -m benchmarks.gpu.block_moves --out DIR [--repeats N]
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.gpu.block_pools import Pools
from benchmarks.gpu.device_time import device_name, median_seconds
from benchmarks.page_section import GPU_WORKER, PageSection
from benchmarks.report import table, write_result
from benchmarks.svg_chart import Line, log_log_chart
from worker_svc.steps.streams import DeviceEvent, SideStream

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FLAT_SIZES = range(16, 129)  # where the cost of swaps is to be flat
MIN_SHARE = 0.8
MIN_FLATNESS = 0.9  # slowest / fastest
OURS = ("copy on write", "swap out", "swap in")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a move."""

    bytes_per_token: int  # of keys and values in all layers
    num_layers: int
    num_tokens: int  # that are moved
    num_layerwise_tokens: int  # that are moved layer by layer, which takes long


GPU_SIZES = Sizes(bytes_per_token=128 << 10, num_layers=32, num_tokens=8192, num_layerwise_tokens=512)
SMALL_SIZES = Sizes(bytes_per_token=512, num_layers=2, num_tokens=512, num_layerwise_tokens=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One row of the table."""

    operation: str
    block_size: int
    block_bytes: int
    gb_per_s: float  # moved: a copy inside a device reads and writes as much
    share: float  # of one contiguous copy of the same bytes, in the same direction


def measure(
    device: torch.device, sizes: Sizes, block_sizes: Iterable[int], repeats: int, by_kernels: bool
) -> list[Rate]:
    """Measure all operations at all block sizes, by Triton's kernels or the torch references."""
    num_bytes = sizes.bytes_per_token * sizes.num_tokens
    pools = Pools(device, num_bytes)
    ceilings = {
        name: num_bytes / median_seconds(device, copy, repeats) / 1e9 for name, copy in pools.contiguous().items()
    }
    rates = [
        Rate(operation=f"{name}, contiguous", block_size=1, block_bytes=num_bytes, gb_per_s=rate, share=1.0)
        for name, rate in ceilings.items()
    ]
    for block_size in block_sizes:
        block_bytes = sizes.bytes_per_token * block_size
        moves = pools.moves(block_bytes, num_bytes)
        timed = {**moves.operations(by_kernels), **(moves.by_either_way() if by_kernels else {})}
        seconds = {name: median_seconds(device, work, repeats) for name, work in timed.items()}
        moves.check()
        layerwise_bytes = sizes.bytes_per_token * sizes.num_layerwise_tokens
        layerwise = pools.moves(block_bytes, layerwise_bytes).layer_by_layer(2 * sizes.num_layers)
        for name, in_seconds, in_bytes in (
            *((name, in_seconds, num_bytes) for name, in_seconds in seconds.items()),
            *((name, median_seconds(device, work, 1), layerwise_bytes) for name, work in layerwise.items()),
        ):
            rate = in_bytes / in_seconds / 1e9
            ceiling = ceilings[name.partition(",")[0]]
            rates.append(
                Rate(
                    operation=name,
                    block_size=block_size,
                    block_bytes=block_bytes,
                    gb_per_s=rate,
                    share=rate / ceiling,
                )
            )
    return rates


def measure_overlap(device: torch.device, sizes: Sizes, block_size: int, repeats: int, by_kernels: bool) -> float:
    """Share of a swap-out's time that computation hides; half of the computation is queued before the swap. 1 is all.

    The computation is products of matrices that take about twice as long.
    """
    num_bytes = sizes.bytes_per_token * sizes.num_tokens
    moves = Pools(device, num_bytes).moves(sizes.bytes_per_token * block_size, num_bytes)
    swap = moves.operations(by_kernels)["swap out"]
    size = 4096 if device.type == "cuda" else 32
    matrix = torch.zeros((size, size), dtype=torch.bfloat16 if device.type == "cuda" else torch.float32, device=device)
    out = torch.empty_like(matrix)
    swap_s = median_seconds(device, swap, repeats)
    product_s = median_seconds(device, lambda: torch.mm(matrix, matrix, out=out), repeats)
    half = max(1, round(swap_s / product_s))
    side = SideStream(device)

    def compute_half() -> None:
        for _ in range(half):
            torch.mm(matrix, matrix, out=out)

    def compute() -> None:
        compute_half()
        compute_half()

    def both() -> None:
        began, swapped = DeviceEvent(device), DeviceEvent(device)
        began.record()
        compute_half()
        with side.current():
            began.hold_stream()
            swap()
            swapped.record()
        compute_half()
        swapped.hold_stream()

    compute_s = median_seconds(device, compute, repeats)
    both_s = median_seconds(device, both, repeats)
    return hidden_share(swap_s, compute_s, both_s)


def hidden_share(swap_s: float, compute_s: float, both_s: float) -> float:
    """Share of the swap's time that computation hides, from 0 to 1."""
    return min(1.0, max(0.0, (swap_s + compute_s - both_s) / min(swap_s, compute_s)))


def flatness(rates: Sequence[Rate], operation: str) -> float:
    """Slowest / fastest over the block sizes in `FLAT_SIZES`; 1 is flat."""
    own = [rate.gb_per_s for rate in rates if rate.operation == operation and rate.block_size in FLAT_SIZES]
    return min(own) / max(own)


def key_figures(rates: Sequence[Rate], hidden: float) -> dict[str, float | bool]:
    """Figures with a target, and whether each is met."""
    figures: dict[str, float | bool] = {"swap_hidden_share": round(hidden, 3)}
    for operation in OURS:
        share = min(rate.share for rate in rates if rate.operation == operation and rate.block_size in FLAT_SIZES)
        name = operation.replace(" ", "_")
        figures |= {f"{name}_share": round(share, 3), f"{name}_share_is_met": share >= MIN_SHARE}
    for operation in ("swap out", "swap in"):
        flat = flatness(rates, operation)
        name = operation.replace(" ", "_")
        figures |= {f"{name}_flatness": round(flat, 3), f"{name}_is_flat": flat >= MIN_FLATNESS}
    return figures


def plot(rates: Sequence[Rate]) -> str:
    """Draw the plot as SVG."""
    named = dict.fromkeys(rate.operation for rate in rates if "contiguous" not in rate.operation)
    shown = [name for name in named if name in OURS or "layer" in name]
    lines = [
        Line(name, [(rate.block_size, rate.gb_per_s) for rate in rates if rate.operation == name]) for name in shown
    ]
    return log_log_chart("Blocks copied and swapped", "block size, tokens", "GB/s", lines)


def main() -> int:
    """Reads the command line and measures; 2 without a GPU."""
    options = parse_arguments()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("This measures a GPU, and there is none here: --device cpu --small runs the same code in small.")
        return 2
    sizes = SMALL_SIZES if options.small else GPU_SIZES
    by_kernels = device.type == "cuda"
    rates = measure(device, sizes, options.block_sizes, options.repeats, by_kernels)
    hidden = measure_overlap(device, sizes, 16, options.repeats, by_kernels)
    rows = [(r.operation, r.block_size, f"{r.gb_per_s:.1f}", f"{r.share:.1%}") for r in rates]
    print(table(("operation", "block size", "GB/s", "of contiguous"), rows))
    is_measured = device.type == "cuda" and not options.small
    figures = key_figures(rates, hidden) if is_measured else {}
    print(
        "\n".join(f"{name}: {value}" for name, value in figures.items())
        or "All of this means nothing but that it runs."
    )
    result = {
        "device": device_name(device),
        "is_measured": is_measured,
        "sizes": asdict(sizes),
        "repeats": options.repeats,
        "targets": {"share": MIN_SHARE, "flatness": MIN_FLATNESS, "block_sizes": [FLAT_SIZES[0], FLAT_SIZES[-1]]},
        "key_figures": figures,
        "rows": [asdict(rate) for rate in rates],
    }
    write_result(options.out / "block_moves.json", "block_moves", result)
    (options.out / "block_moves.svg").write_text(plot(rates))
    return 0


def parse_arguments() -> argparse.Namespace:
    """Defaults are those of the kept result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="little blocks, to see that it runs")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=BLOCK_SIZES, help="16, 128 among them; to 256")
    parser.add_argument("--repeats", type=int, default=9)
    return parser.parse_args()


SECTION = PageSection(
    kinds=("block_moves",),
    title="Copies and swaps on a GPU",
    question="What do copy-on-write and swap reach of one contiguous copy?",
    command="python -m benchmarks.gpu.block_moves --out DIR",
    measures=GPU_WORKER,
    target="≥ 80 % of one contiguous copy",
)


if __name__ == "__main__":
    sys.exit(main())
