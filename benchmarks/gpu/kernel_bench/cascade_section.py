"""Attention of rows that begin with the same blocks: the prefix once for all, against plain decode of the same rows.

Plain decode finds much of a shared prefix in the L2 cache, so what is gained is less than the bytes that are saved.
"""

from dataclasses import replace

import torch

from benchmarks.gpu.kernel_bench.decode_section import exact_result, launches_of, plan_of
from benchmarks.gpu.kernel_bench.figures import Figure, Figures, Target, times_faster
from benchmarks.gpu.kernel_bench.lab import Lab, PagedCase, PagedInputs, checked, make_inputs
from kernels.attention import cascade_attention, cascade_plan
from kernels.attention.cascade_config import CascadeConfig, cascade_config
from kernels.attention.cascade_groups import SharedPrefix, fill_cascade_arrays
from kernels.attention.cascade_reference import CascadePlan, empty_cascade_plan, prefix_groups
from kernels.attention.decode_reference import DecodeRows
from kernels.attention.device_family import family_of

SECTION = "cascade"
NUM_LAYERS = 4  # in turn, so that suffixes are not found in the L2 cache
MIN_GAIN = Target("value", 3.0)


def measure(lab: Lab, figures: Figures) -> None:
    """Add both ways to attend to the same rows, and their ratio."""
    heads, num_rows, prefix, suffix = ((4, 2, 32), 3, 32, 9) if lab.is_tiny else ((32, 8, 128), 64, 2048, 256)
    name = f"{num_rows} sharers of {prefix}, {suffix} of their own"
    num_layers = 1 if lab.is_tiny else NUM_LAYERS
    case = PagedCase(name=name, heads=heads, contexts=(prefix + suffix,) * num_rows, num_layers=num_layers)
    inputs = shared_inputs(make_inputs(lab, case), prefix)
    exact = exact_result(inputs, num_layers - 1)

    out = torch.full_like(inputs.query, torch.nan)
    plain_us = lab.clock.launch_us(launches_of(inputs, plan_of(lab, inputs), out))
    plain = Figure(section=SECTION, case=name, by="quire, plain decode", unit="us", value=plain_us, us=plain_us)
    plain = replace(plain, check=checked(out, exact))

    out.fill_(torch.nan)
    plan = cascade_plan_of(lab, inputs, prefix)
    us = lab.clock.launch_us(
        [lambda layer=layer: attend(inputs, plan, layer, out) for layer in range(num_layers)]  # type: ignore[misc]
    )
    cascade = Figure(section=SECTION, case=name, unit="us", value=us, us=us, check=checked(out, exact))
    planning_us = lab.clock.launch_us([lambda: cascade_plan.fill_cascade_plan(plan)])
    planning = Figure(
        section=SECTION,
        case=f"plan of {num_rows} sharers",
        unit="us",
        value=planning_us,
        us=planning_us,
        note="once a step",
    )
    figures.add(plain, cascade, planning, times_faster(f"cascade, {name}: plain / cascade", cascade, plain, MIN_GAIN))


def shared_inputs(inputs: PagedInputs, prefix: int) -> PagedInputs:
    """Let all rows begin with the first row's blocks; `prefix` keys are whole blocks."""
    assert prefix % inputs.block_size == 0
    tables = inputs.block_tables.clone()
    tables[:, : prefix // inputs.block_size] = tables[0, : prefix // inputs.block_size]
    return replace(inputs, block_tables=tables)


def cascade_plan_of(lab: Lab, inputs: PagedInputs, prefix: int, config: CascadeConfig | None = None) -> CascadePlan:
    """Plan of one group with all rows, filled as a step would."""
    num_rows = len(inputs.contexts)
    shared = SharedPrefix(tuple(range(num_rows)), prefix // inputs.block_size)
    arrays = fill_cascade_arrays([shared], num_rows, inputs.block_size)
    on_device = {name: torch.from_numpy(array).to(lab.device) for name, array in arrays.items()}
    plan = empty_cascade_plan(
        DecodeRows(inputs.context_lens, inputs.block_tables),
        prefix_groups(on_device, num_rows),
        inputs.shape,
        config or cascade_config(inputs.shape, family_of(lab.device)),
        inputs.block_size,
        lab.num_processors,
    )
    cascade_plan.fill_cascade_plan(plan)
    return plan


def attend(inputs: PagedInputs, plan: CascadePlan, layer: int, out: torch.Tensor) -> None:
    """Launch one layer."""
    caches = (inputs.key_cache(layer), inputs.value_cache(layer))
    cascade_attention.cascade_attention(inputs.query, *caches, plan, inputs.rule, out)
