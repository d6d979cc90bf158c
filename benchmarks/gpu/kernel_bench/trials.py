"""Times one way to launch an attention kernel over a few workloads of a shape, and checks what it computes."""

from collections.abc import Callable, Sequence
from statistics import geometric_mean

import torch

from benchmarks.gpu.kernel_bench import cascade_section, decode_section, prefill_section
from benchmarks.gpu.kernel_bench.candidates import Compiled
from benchmarks.gpu.kernel_bench.figures import Check
from benchmarks.gpu.kernel_bench.lab import Lab, PagedCase, PagedInputs, checked, make_inputs
from kernels.attention import cascade_attention
from kernels.attention.cascade_config import CascadeConfig
from kernels.attention.decode_config import DecodeConfig, decode_config
from kernels.attention.prefill_config import PrefillConfig
from kernels.attention.shape import AttentionShape
from kernels.attention.tuned_lookup import AttentionKernel

KV_BYTES = 1 << 29  # of a decode workload: several times what the L2 cache holds
MAX_ROWS = 512
Trial = Callable[[Compiled], float]


def trials(lab: Lab, kernel: AttentionKernel, shape: AttentionShape) -> Callable[[Compiled], float]:
    """The mean time of a way in us, over workloads whose inputs are made once; infinite if a result is wrong."""
    make: dict[str, Callable[[Lab, AttentionShape], Sequence[Trial]]] = {
        "decode": _decode_trials,
        "prefill": _prefill_trials,
        "prefix": _prefix_trials,
    }
    workloads = make[kernel](lab, shape)
    return lambda way: geometric_mean([workload(way) for workload in workloads])


def decode_config_of(way: Compiled) -> DecodeConfig:
    tiling = way.tiling
    return DecodeConfig(
        tile=tiling.tile,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        programs_per_sm=way.programs_per_sm,
    )


def _decode_trials(lab: Lab, shape: AttentionShape) -> list[Trial]:
    """Long rows, and many short ones."""
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    key_bytes = 2 * shape.num_kv_heads * shape.head_dim * shape.kv_dtype.itemsize
    workloads = []
    for context in (20,) if lab.is_tiny else (4096, 512):
        num_rows = 2 if lab.is_tiny else min(MAX_ROWS, max(1, KV_BYTES // (key_bytes * context)))
        inputs = make_inputs(lab, _case(lab, shape, heads, (context,) * num_rows))
        workloads.append(_decode_trial(lab, inputs))
    return workloads


def _decode_trial(lab: Lab, inputs: PagedInputs) -> Trial:
    exact = decode_section.exact_result(inputs)
    out = torch.empty_like(inputs.query)

    def trial(way: Compiled) -> float:
        out.fill_(torch.nan)
        plan = decode_section.plan_of(lab, inputs, decode_config_of(way))
        us = lab.clock.launch_us(decode_section.launches_of(inputs, plan, out))
        return _if_right(us, checked(out, exact))

    return trial


def _prefill_trials(lab: Lab, shape: AttentionShape) -> list[Trial]:
    """Whole prompts, and chunks at the end of contexts."""
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    kinds = ((20,), (9,)), ((4096,) * 4, (4096,) * 4), ((2048,) * 16, (512,) * 16)
    workloads = []
    for contexts, query_lens in kinds[:1] if lab.is_tiny else kinds[1:]:
        inputs = make_inputs(lab, _case(lab, shape, heads, contexts, query_lens))
        workloads.append(_prefill_trial(lab, inputs))
    return workloads


def _prefill_trial(lab: Lab, inputs: PagedInputs) -> Trial:
    out = torch.empty_like(inputs.query)

    def trial(way: Compiled) -> float:
        out.fill_(torch.nan)
        plan = prefill_section.plan_of(inputs, PrefillConfig(**way.tiling._asdict()))
        us = lab.clock.launch_us([lambda: prefill_section.attend(inputs, plan, out)])
        return _if_right(us, prefill_section.check_of(inputs, out))

    return trial


def _prefix_trials(lab: Lab, shape: AttentionShape) -> list[Trial]:
    """A prefix that many rows share; the time is that of the prefix alone."""
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    num_rows, prefix, suffix = (3, 32, 9) if lab.is_tiny else (64, 2048, 64)
    case = _case(lab, shape, heads, (prefix + suffix,) * num_rows)
    inputs = cascade_section.shared_inputs(make_inputs(lab, case), prefix)
    exact = decode_section.exact_result(inputs)
    out = torch.empty_like(inputs.query)

    def trial(way: Compiled) -> float:
        config = CascadeConfig(rows=way.tiling.rows, prefix=decode_config_of(way), suffix=decode_config(inputs.shape))
        plan = cascade_section.cascade_plan_of(lab, inputs, prefix, config)
        caches = (inputs.key_cache(), inputs.value_cache())
        us = lab.clock.launch_us([lambda: cascade_attention.attend_prefixes(inputs.query, *caches, plan, inputs.rule)])
        out.fill_(torch.nan)
        cascade_section.attend(inputs, plan, 0, out)
        return _if_right(us, checked(out, exact))

    return [trial]


def _case(
    lab: Lab,
    shape: AttentionShape,
    heads: tuple[int, int, int],
    contexts: tuple[int, ...],
    query_lens: tuple[int, ...] | None = None,
) -> PagedCase:
    kv_dtype = None if shape.kv_dtype == shape.dtype else shape.kv_dtype
    return PagedCase(
        name="trial",
        heads=(4, 2, 32) if lab.is_tiny else heads,
        contexts=contexts,
        query_lens=query_lens,
        kv_dtype=kv_dtype,
    )


def _if_right(us: float, check: Check) -> float:
    return us if check.is_right else float("inf")
