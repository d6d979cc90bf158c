"""Sections of the results page, in its order. Each benchmark exports its own.

A kind of result that is not here has no section, and the page is not made.
"""

from benchmarks import containers
from benchmarks.cpu import (
    accuracy,
    cpu_attention,
    cpu_step,
    int8_speed,
    request_kinds,
    tensor_parallel,
    weight_accuracy,
)
from benchmarks.durability import durability_cost, failover_time, journal_cost, recovery_time
from benchmarks.fleet import section as fleet
from benchmarks.gpu import (
    against_transformers,
    attention_libraries,
    block_moves,
    block_size_sweep,
    decode_step,
    keep_figures,
    kernels,
    roofline,
    start_compilation,
    swap_or_recompute,
)
from benchmarks.gpu.host import section as gpu_host
from benchmarks.memory import kv_utilisation, memory_saving, prefix_reuse
from benchmarks.overhead import section as overhead
from benchmarks.page_section import PageSection
from benchmarks.paper import section as paper
from benchmarks.peers import section as peers
from benchmarks.results_page import conformance, faults, interfaces, scaling
from benchmarks.scale import routing_hits, routing_speed, schedule_cost, shard_throughput, summary_forms, travel_section
from benchmarks.scale import section as scale
from benchmarks.services import gateway_cost

SECTIONS: tuple[PageSection, ...] = (
    peers.SECTION,
    containers.SECTION,
    cpu_step.SECTION,
    cpu_attention.SECTION,
    int8_speed.SECTION,
    tensor_parallel.SECTION,
    accuracy.SECTION,
    weight_accuracy.SECTION,
    request_kinds.SECTION,
    overhead.SECTION,
    gateway_cost.SECTION,
    scale.SECTION,
    schedule_cost.SECTION,
    shard_throughput.SECTION,
    routing_hits.SECTION,
    routing_speed.SECTION,
    summary_forms.SECTION,
    fleet.SECTION,
    travel_section.SECTION,
    journal_cost.SECTION,
    durability_cost.SECTION,
    recovery_time.SECTION,
    failover_time.SECTION,
    faults.FAULTS,
    faults.SIMULATION,
    faults.HOSTILE_INPUT,
    faults.STRUCTURED_OUTPUTS,
    faults.GATEWAY_DEATHS,
    scaling.SCALING,
    interfaces.OPENAPI,
    interfaces.EVALUATION,
    conformance.OPEN_RESPONSES,
    kv_utilisation.SECTION,
    memory_saving.SECTION,
    prefix_reuse.SECTION,
    paper.SECTION,
    start_compilation.SECTION,
    keep_figures.SECTION,
    roofline.SECTION,
    kernels.SECTION,
    attention_libraries.SECTION,
    gpu_host.SECTION,
    decode_step.SECTION,
    against_transformers.SECTION,
    block_moves.SECTION,
    swap_or_recompute.SECTION,
    block_size_sweep.SECTION,
)


def section_of_kind(kind: str) -> PageSection:
    """Raises ValueError for a kind that has no section."""
    for section in SECTIONS:
        if kind in section.kinds:
            return section
    raise ValueError(f"no section shows results of the kind {kind!r}; write a `SECTION` and list it in {__name__}")
