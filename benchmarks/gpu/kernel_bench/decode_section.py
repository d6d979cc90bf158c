"""Decode attention: bytes of keys and values a second, as share of what the device reads at best; the price of paging.

A launch of the table takes one query for each row, over one layer's keys and values in shuffled blocks.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from benchmarks.gpu.kernel_bench.ceilings import READ
from benchmarks.gpu.kernel_bench.clock import Launch
from benchmarks.gpu.kernel_bench.figures import Figure, Figures, Target, not_measured, times_faster
from benchmarks.gpu.kernel_bench.lab import Lab, PagedCase, PagedInputs, Size, checked, make_inputs, rotated
from benchmarks.gpu.kernel_bench.peers import Peer, Peers, timed
from benchmarks.lengths import LengthSampler
from kernels.attention import decode_attention, decode_plan, decode_reference
from kernels.attention.decode_config import DecodeConfig, decode_config
from kernels.attention.decode_reference import DecodePlan, DecodeRows, empty_plan
from kernels.attention.device_family import family_of

SECTION = "decode"
GQA, MHA, MQA = (32, 8, 128), (32, 32, 128), (32, 1, 128)
MAIN, CONTIGUOUS, MULTI_HEAD = "GQA 64 x 4096", "GQA 64 x 4096, contiguous", "MHA 32 x 2048"
MIN_SHARE, MAX_PAGING, MAX_LATENCY_US = 0.85, 1.05, 12.0
GOOD_SHARE = Target("share", MIN_SHARE)
FAST = Target("value", MAX_LATENCY_US, at_most=True)
MIN_GAIN = Target("value", 1.0)


def cases(lab: Lab) -> list[PagedCase]:
    """Cases by importance; peers and paging are compared on the first two."""
    if lab.is_tiny:
        small = (17,)
        return [
            PagedCase(name=MAIN, heads=(4, 2, 32), contexts=(32, 32)),
            PagedCase(name=CONTIGUOUS, heads=(4, 2, 32), contexts=(32,), block_size=32, shuffled=False),
            PagedCase(name=MULTI_HEAD, heads=(2, 2, 32), contexts=small),
            PagedCase(name="tiny, e4m3 cache", heads=(4, 2, 32), contexts=small, kv_dtype=torch.float8_e4m3fn),
        ]
    e4m3 = torch.float8_e4m3fn
    first = [
        PagedCase(name=MAIN, heads=GQA, contexts=(4096,) * 64),
        PagedCase(name=CONTIGUOUS, heads=GQA, contexts=(4096,) * 64, block_size=4096, shuffled=False),
        PagedCase(name=MULTI_HEAD, heads=MHA, contexts=(2048,) * 32),
        PagedCase(name="GQA 128 x 4096, e4m3 cache", heads=GQA, contexts=(4096,) * 128, kv_dtype=e4m3),
        PagedCase(name="GQA 512, ShareGPT lengths", heads=GQA, contexts=sharegpt_contexts(512)),
    ]
    if not family_of(lab.device).has_e4m3:
        first = [case for case in first if case.kv_dtype != e4m3]
    if lab.size is Size.QUICK:
        return first
    blocks = [
        PagedCase(name=f"GQA 64 x 4096, blocks of {size}", heads=GQA, contexts=(4096,) * 64, block_size=size)
        for size in (32, 64, 128)
    ]
    return [
        *first,
        PagedCase(name="GQA 32 x 8192", heads=GQA, contexts=(8192,) * 32),
        PagedCase(name="GQA 256 x 1024", heads=GQA, contexts=(1024,) * 256),
        PagedCase(name="MQA 512 x 4096", heads=MQA, contexts=(4096,) * 512),
        PagedCase(name="GQA 64 x 4096, one layer of eight", heads=GQA, contexts=(4096,) * 64, num_layers=8),
        *blocks,
    ]


def sharegpt_contexts(num_rows: int) -> tuple[int, ...]:
    """Context lengths of requests that are somewhere in their answers, as in a running batch."""
    requests = islice(LengthSampler("sharegpt", seed=1), num_rows)
    return tuple(each.num_input + each.num_output * (row % 97) // 96 for row, each in enumerate(requests))


def measure(lab: Lab, figures: Figures, peers: Peers) -> None:
    """Add all rows of the section, and their ratios."""
    paged = (peers.flash_attention, peers.flashinfer)
    beside = {MAIN: (*paged, peers.transformers), CONTIGUOUS: (peers.sdpa,), MULTI_HEAD: paged}
    for case in cases(lab):
        inputs = make_inputs(lab, case)
        exact = exact_result(inputs, inputs.num_layers - 1)
        figures.add(_own(lab, figures, case, inputs, exact))
        for peer in beside.get(case.name, ()):
            figures.add(_peer(lab, figures, case, inputs, peer, exact))
    figures.add(*_latencies(lab), _planning(lab))
    figures.add(*_comparisons(figures, paged))


def plan_of(lab: Lab, inputs: PagedInputs, config: DecodeConfig | None = None) -> DecodePlan:
    """Plan filled as a step would."""
    rows = DecodeRows(inputs.context_lens, inputs.block_tables)
    config = config or decode_config(inputs.shape, family_of(lab.device))
    plan = empty_plan(rows, inputs.shape, config, inputs.block_size, lab.num_processors * config.programs_per_sm)
    decode_plan.fill_plan(plan)
    return plan


def launches_of(inputs: PagedInputs, plan: DecodePlan, out: Tensor) -> list[Launch]:
    """Launches for each layer, in the order of a model's layers."""
    return [
        lambda layer=layer: decode_attention.decode_attention(  # type: ignore[misc]
            inputs.query, inputs.key_cache(layer), inputs.value_cache(layer), plan, inputs.rule, False, out
        )
        for layer in range(inputs.num_layers)
    ]


def exact_result(inputs: PagedInputs, layer: int = 0) -> Tensor:
    """Result of the reference, in float32."""
    rows = DecodeRows(inputs.context_lens, inputs.block_tables)
    plan = empty_plan(rows, inputs.shape, decode_config(inputs.shape), inputs.block_size, num_programs=1)
    out = torch.empty(inputs.query.shape, device=inputs.query.device)
    caches = (inputs.key_cache(layer), inputs.value_cache(layer))
    decode_reference.decode_attention(inputs.query, *caches, plan, inputs.rule, False, out)
    return out


def _own(lab: Lab, figures: Figures, case: PagedCase, inputs: PagedInputs, exact: Tensor) -> Figure:
    out = torch.full_like(inputs.query, torch.nan)
    us = lab.clock.launch_us(launches_of(inputs, plan_of(lab, inputs), out)[-1:])
    return replace(_figure(figures, case, inputs, us), target=GOOD_SHARE, check=checked(out, exact))


def _peer(lab: Lab, figures: Figures, case: PagedCase, inputs: PagedInputs, peer: Peer, exact: Tensor) -> Figure:
    found = timed(peer, inputs, lab.clock, lambda result: checked(result, exact))
    if isinstance(found, str):
        return not_measured(replace(_figure(figures, case, inputs, 1.0), by=peer.name), found)
    return replace(_figure(figures, case, inputs, found.us), by=peer.name, check=found.check)


def _figure(figures: Figures, case: PagedCase, inputs: PagedInputs, us: float) -> Figure:
    return Figure(
        section=SECTION,
        case=case.name,
        unit="GB/s",
        value=inputs.kv_bytes / us / 1e3,
        us=us,
        ceiling=figures.ceiling(READ),
        note=f"{inputs.kv_bytes / 1e9:.2f} GB, blocks of {inputs.block_size}",
    )


def _latencies(lab: Lab) -> list[Figure]:
    """Time one row: with its keys in the L2 cache, and with other keys for each layer, as in a model."""
    heads, contexts = ((4, 2, 32), (20,)) if lab.is_tiny else (GQA, (4096,))
    single = PagedCase(name="GQA 1 x 4096, cached", heads=heads, contexts=contexts)
    kv_bytes = 2 * sum(contexts) * heads[1] * heads[2] * lab.dtype.itemsize
    layers = replace(single, name="GQA 1 x 4096, layer after layer", num_layers=rotated(kv_bytes, lab))
    rows = []
    for case in (single, layers):
        inputs = make_inputs(lab, case)
        out = torch.full_like(inputs.query, torch.nan)
        us = lab.clock.launch_us(launches_of(inputs, plan_of(lab, inputs), out))
        check = checked(out, exact_result(inputs, inputs.num_layers - 1))
        rows.append(
            Figure(
                section=SECTION, case=case.name, unit="us", value=us, us=us, target=FAST, check=check, note="replayed"
            )
        )
    return rows


def _planning(lab: Lab) -> Figure:
    """Time the planning, which runs once a step for all layers."""
    num_rows = 1 if lab.is_tiny else 256
    inputs = make_inputs(lab, PagedCase(name="plan", heads=(4, 2, 32), contexts=tuple(range(1, 4 * num_rows, 4))))
    plan = plan_of(lab, inputs)
    us = lab.clock.launch_us([lambda: decode_plan.fill_plan(plan)])
    return Figure(section=SECTION, case="plan of 256 rows", unit="us", value=us, us=us, note="once a step")


def _comparisons(figures: Figures, peers: Iterable[Peer]) -> list[Figure]:
    own, contiguous = figures.find(SECTION, MAIN), figures.find(SECTION, CONTIGUOUS)
    paging = Target("value", MAX_PAGING, at_most=True)
    rows = [times_faster("price of paging: blocks of 16 / contiguous", contiguous, own, paging)]
    for peer in peers:
        other = figures.find(SECTION, MAIN, peer.name)
        rows.append(times_faster(f"decode, GQA 64 x 4096: {peer.name} / quire", own, other, MIN_GAIN))
        other = figures.find(SECTION, MULTI_HEAD, peer.name)
        mine = figures.find(SECTION, MULTI_HEAD)
        rows.append(times_faster(f"decode, MHA 32 x 2048: {peer.name} / quire", mine, other, MIN_GAIN))
    return rows
