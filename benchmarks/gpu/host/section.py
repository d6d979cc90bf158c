"""Section of the results page on the host's part of a step."""

from benchmarks.page_section import GPU_WORKER, Document, Headline, PageSection, Section, at_most, grid, number
from benchmarks.report import percentile

MIXED_TARGET_MS, DECODE_TARGET_MS = 0.8, 0.5
_KINDS = {True: "graphs", False: "kernel by kernel"}


def section_of(document: Document) -> Section:
    """Render a result."""
    mixed, decode = (document["key_figures"][name] for name in ("host_mixed_step_ms", "host_decode_step_ms"))
    launches = document["launches"]
    graphs = [row for row in launches if row["by_graph"]]
    apart = {row["kind"]: row for row in launches if not row["by_graph"]}
    most = max(row["kernels"] + row["operations"] for row in graphs)
    median = percentile([row["kernels"] + row["operations"] for row in apart.values()], 50)
    return Section(
        done=(
            "A runner of an 8 B model (32 layers) with all of its host code and Triton's launcher; the CUDA driver and "
            "the replay of a graph are stubs that do nothing, and products only make their output. CPU time of the "
            "thread that launches a step, and of reading its result; rows sample with temperature and top-p."
        ),
        headlines=[
            Headline(
                f"{number(mixed, 2, MIXED_TARGET_MS)} ms for 64 rows that decode and a chunk of 512",
                [at_most(mixed, MIXED_TARGET_MS, "ms")],
            ),
            Headline(
                f"{number(decode, 2, DECODE_TARGET_MS)} ms for 256 rows that decode",
                [at_most(decode, DECODE_TARGET_MS, "ms")],
            ),
            Headline(
                f"one graph and at most {most} launches a step, by the median kind {median:g} kernel by kernel; "
                f"{sum(row['reads'] for row in launches)} reads that wait for the device, "
                f"{sum(row['compiled'] for row in launches)} compilations after the start"
            ),
        ],
        blocks=[
            grid(
                ("step", "passes", "launch, ms", "p90", "result, ms", "both"),
                [
                    (row["load"], _KINDS[row["by_graph"]], *(f"{row[key]:.3f}" for key in _COST_KEYS))
                    for row in document["costs"]
                ],
            ),
            "What launching a step asks of the device, recorded on a model without content, where a read fails. "
            "Operations are torch's: products, copies and others. The host waits for one event to read a result, on "
            "another thread.",
            grid(
                ("step", "graphs", "kernels", "operations", "kernels without graphs", "operations", "reads"),
                [
                    (
                        row["kind"],
                        row["graphs"],
                        row["kernels"],
                        row["operations"],
                        apart[row["kind"]]["kernels"],
                        apart[row["kind"]]["operations"],
                        row["reads"] + apart[row["kind"]]["reads"],
                    )
                    for row in graphs
                ],
            ),
        ],
        versions=("torch", "triton"),
    )


_COST_KEYS = ("launch_ms", "launch_p90_ms", "result_ms", "total_ms")

SECTION = PageSection(
    kinds=("host_cost",),
    title="The host's part of a step on a GPU",
    question="How long does the host work for a step on a GPU, and what does it launch? Measured without one.",
    command="python -m benchmarks.gpu.host",
    measures=GPU_WORKER,
    target="≤ 0.8 ms for 64 rows and a chunk of 512, ≤ 0.5 ms for 256 rows that decode",
    render=section_of,
)
