"""Prefill attention: causal operations a second, as share of what a product of matrices reaches.

Whole prompts of equal length, sixteen thousand tokens together, and chunks at the end of longer contexts. The keys of
a short chunk are split between programs.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.kernel_bench.ceilings import PRODUCT
from benchmarks.gpu.kernel_bench.figures import Check, Figure, Figures, Target, not_measured, times_faster
from benchmarks.gpu.kernel_bench.lab import Lab, PagedCase, PagedInputs, Size, checked, make_inputs
from benchmarks.gpu.kernel_bench.peers import Peer, Peers, timed
from kernels.attention import prefill_attention, prefill_reference
from kernels.attention.decode_config import num_processors
from kernels.attention.device_family import family_of
from kernels.attention.prefill_config import PrefillConfig, prefill_config
from kernels.attention.prefill_plan import prefill_work
from kernels.attention.prefill_reference import PrefillPlan, PrefillRows, empty_partials

SECTION = "prefill"
HEADS = (32, 8, 128)
TOKENS = 16384
MIN_TFLOPS = Target("value", 350.0)
TARGET_FROM = 4096  # tokens of a prompt, from which on the target is for
MASKED = "4 x 4096"  # where all prompts stand under one mask, too
CHECKED_QUERIES = 64  # at the start and at the end of each row: the reference keeps all scores


def whole(lab: Lab, length: int) -> PagedCase:
    rows = 1 if lab.is_tiny else max(1, TOKENS // length)
    heads = (4, 2, 32) if lab.is_tiny else HEADS
    return PagedCase(name=f"{rows} x {length}", heads=heads, contexts=(length,) * rows, query_lens=(length,) * rows)


def contiguous(case: PagedCase) -> PagedCase:
    return replace(case, block_size=case.contexts[0], shuffled=False)


def cases(lab: Lab) -> list[PagedCase]:
    if lab.is_tiny:
        return [
            whole(lab, 17),
            PagedCase(name="chunk of 9 of 40", heads=(4, 2, 32), contexts=(40,), query_lens=(9,)),
            PagedCase(name="chunk of 4 of 400", heads=(4, 2, 32), contexts=(400,), query_lens=(4,)),
        ]
    lengths = (4096, 16384) if lab.size is Size.QUICK else (1024, 2048, 4096, 8192, 16384)
    return [
        *(whole(lab, length) for length in lengths),
        PagedCase(name="chunk of 2048 of 16384", heads=HEADS, contexts=(16384,), query_lens=(2048,)),
        PagedCase(name="16 chunks of 512 of 4096", heads=HEADS, contexts=(4096,) * 16, query_lens=(512,) * 16),
        PagedCase(name="chunk of 64 of 32768", heads=HEADS, contexts=(32768,), query_lens=(64,)),
    ]


def measure(lab: Lab, figures: Figures, peers: Peers) -> None:
    """Add all rows of the section."""
    for case in cases(lab):
        inputs = make_inputs(lab, case)
        figures.add(_own(lab, figures, case, inputs))
        for peer in (peers.flash_attention, peers.flashinfer):
            figures.add(_peer(lab, figures, case, inputs, peer))
        if lab.is_tiny or case.name == MASKED:
            figures.add(_peer(lab, figures, case, inputs, peers.transformers))
        if inputs.query_lens == inputs.contexts:
            figures.add(_peer(lab, figures, case, make_inputs(lab, contiguous(case)), peers.sdpa))
        own = figures.find(SECTION, case.name)
        other = figures.find(SECTION, case.name, peers.flash_attention.name)
        figures.add(times_faster(f"prefill, {case.name}: {peers.flash_attention.name} / quire", own, other))


def plan_of(inputs: PagedInputs, config: PrefillConfig | None = None) -> PrefillPlan:
    rows = PrefillRows(inputs.query_start, inputs.context_lens, inputs.block_tables)
    device = inputs.query.device
    config = config or prefill_config(inputs.shape, family_of(device))
    programs = num_processors(device)
    work = prefill_work(np.array(inputs.query_lens), np.array(inputs.contexts), inputs.shape, config, programs)
    return PrefillPlan(
        rows=rows,
        shape=inputs.shape,
        config=config,
        block_size=inputs.block_size,
        sliding_window=None,
        work=torch.from_numpy(work).to(device),
        partials=empty_partials(inputs.shape, config, programs, device),
    )


def attend(inputs: PagedInputs, plan: PrefillPlan, out: Tensor) -> None:
    """Launch once."""
    caches = (inputs.key_cache(), inputs.value_cache())
    prefill_attention.prefill_attention(inputs.query, *caches, plan, inputs.rule, False, out)


def check_of(inputs: PagedInputs, result: Tensor) -> Check:
    """Check against the reference in float32, at the first and the last queries of each row."""
    starts, lens, contexts = inputs.query_start.tolist(), inputs.query_lens, inputs.contexts
    counts = tuple(min(CHECKED_QUERIES, queries) for queries in lens)
    firsts = [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=False)]
    lasts = [torch.arange(end - count, end) for end, count in zip(starts[1:], counts, strict=True)]
    early = tuple(context - queries + n for context, queries, n in zip(contexts, lens, counts, strict=True))
    checks = []
    for tokens, ends in ((torch.cat(firsts), early), (torch.cat(lasts), contexts)):
        tokens = tokens.to(result.device)
        query_start = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(result.device)
        context_lens = torch.tensor(ends, dtype=torch.int32, device=result.device)
        part = replace(
            inputs,
            query=inputs.query[tokens],
            query_start=query_start,
            context_lens=context_lens,
            query_lens=counts,
            contexts=ends,
        )
        exact = torch.empty(part.query.shape, device=result.device)
        caches = (part.key_cache(), part.value_cache())
        prefill_reference.prefill_attention(part.query, *caches, plan_of(part), part.rule, False, exact)
        checks.append(checked(result[tokens], exact))
    return max(checks, key=lambda check: check.max_error / check.allowed)


def _own(lab: Lab, figures: Figures, case: PagedCase, inputs: PagedInputs) -> Figure:
    out = torch.full_like(inputs.query, torch.nan)
    plan = plan_of(inputs)
    us = lab.clock.launch_us([lambda: attend(inputs, plan, out)])
    row = replace(_figure(figures, case, inputs, us), check=check_of(inputs, out))
    return replace(row, target=MIN_TFLOPS) if case.contexts[0] >= TARGET_FROM else row


def _peer(lab: Lab, figures: Figures, case: PagedCase, inputs: PagedInputs, peer: Peer) -> Figure:
    found = timed(peer, inputs, lab.clock, lambda result: check_of(inputs, result))
    if isinstance(found, str):
        return not_measured(replace(_figure(figures, case, inputs, 1.0), by=peer.name), found)
    return replace(_figure(figures, case, inputs, found.us), by=peer.name, check=found.check)


def _figure(figures: Figures, case: PagedCase, inputs: PagedInputs, us: float) -> Figure:
    return Figure(
        section=SECTION,
        case=case.name,
        unit="TFLOP/s",
        value=inputs.causal_flops / us / 1e6,
        us=us,
        ceiling=figures.ceiling(PRODUCT),
        note=f"blocks of {inputs.block_size}",
    )
