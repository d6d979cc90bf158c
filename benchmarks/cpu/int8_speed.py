"""Speed of a decode step on a CPU with weights in int8 and as they are: both in one process, in turn.

A random model decodes at several numbers of rows, without services. Prints a table and writes JSON. What int8 costs in
accuracy is the matter of `benchmarks.cpu.accuracy`.

    python -m benchmarks.cpu.int8_speed [--model 125m] [--dtype bfloat16] [--rows 1 4 8 32] [--rounds 7]
"""

import argparse
import statistics
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.cpu.cpu_step import NUM_WARM_UP, SMALL_SHAPE, decode_steps, random_decoder
from benchmarks.page_section import (
    CPU_WORKER,
    Document,
    Headline,
    PageSection,
    ResultRow,
    Section,
    at_least,
    grid,
    number,
)
from benchmarks.random_models import SHAPES
from benchmarks.report import RESULTS, table, write_result
from worker_svc.cpu.host_decoder import HostDecoder
from worker_svc.cpu.start import choose_host

CONTEXT = 128
LEAST_SPEEDUP = 1.4  # at one row, where reading the weights is nearly all
ONE_ROW = 1


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="125m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of what is not in int8")
    parser.add_argument("--rows", type=int, nargs="+", default=[ONE_ROW, 4, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="of each kind in each round")
    parser.add_argument("--small", action="store_true", help="a tiny model: a smoke test")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    shape = SMALL_SHAPE if options.small else SHAPES[options.model]
    hosts = [choose_host("native", dtype, int8_weights=int8, int8_kv=False) for int8 in (False, True)]
    decoders = [random_decoder(shape, dtype, host.packing.make_product) for host in hosts]
    kernels = hosts[0].kernels
    models = [HostDecoder(decoder, kernels) for decoder in decoders]
    rows = []
    for num_rows in options.rows:
        rounds = [[_step_ms(model, num_rows, options.steps) for model in models] for _ in range(options.rounds)]
        plain, int8 = (statistics.median(each) for each in zip(*rounds, strict=True))
        speedup = round(statistics.median(plain / int8 for plain, int8 in rounds), 3)
        rows.append({"rows": num_rows, "plain_ms": round(plain, 3), "int8_ms": round(int8, 3), "speedup": speedup})
    print(table(["rows", options.dtype, "int8", "times"], [list(row.values()) for row in rows]))
    figures = {
        "model": asdict(shape),
        "dtype": options.dtype,
        "kernels": kernels.name,
        "threads": torch.get_num_threads(),
        "context": CONTEXT,
        "rounds": options.rounds,
        "least_speedup": LEAST_SPEEDUP,
        "figures": rows,
    }
    write_result(options.out / "int8_speed.json", "int8_speed", figures)


def _step_ms(model: HostDecoder, num_rows: int, num_steps: int) -> float:
    steps = list(decode_steps(model, num_rows, CONTEXT, num_steps))
    return statistics.median(steps[NUM_WARM_UP:])


def section_of(document: Document) -> Section:
    rows: list[ResultRow] = document["figures"]
    one = next(row for row in rows if row["rows"] == 1)
    least = document["least_speedup"]
    headline = Headline(
        f"at 1 row {number(one['speedup'], 2, least)} times as fast as with weights in {document['dtype']}",
        [at_least(one["speedup"], least, "times")],
    )
    return Section(
        done=(
            "A random model decodes in this process, without services, with weights as they are and in int8, in turn. "
            f"Medians of {document['rounds']} rounds, and of their ratios; kernels: {document['kernels']}; "
            f"{document['threads']} threads; context {document['context']}."
        ),
        headlines=[headline],
        blocks=[
            grid(
                ("rows", f"{document['dtype']}, ms a step", "int8, ms a step", "times as fast"),
                [(row["rows"], row["plain_ms"], row["int8_ms"], f"{row['speedup']:.2f}") for row in rows],
            )
        ],
        versions=("torch",),
    )


SECTION = PageSection(
    kinds=("int8_speed",),
    title="Speed of int8 weights",
    question="How much faster is a step on a CPU with weights in int8?",
    command="python -m benchmarks.cpu.int8_speed",
    measures=(*CPU_WORKER, "benchmarks/cpu/int8_speed.py"),
    target="1.4 × bfloat16 at one row",
    render=section_of,
)


if __name__ == "__main__":
    main()
