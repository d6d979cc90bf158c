"""Speed of a layer's kernels beside products and attention: bytes a second, as share of what a copy reaches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.kernel_bench.ceilings import COPY
from benchmarks.gpu.kernel_bench.clock import Launch
from benchmarks.gpu.kernel_bench.figures import Check, Figure, Figures
from benchmarks.gpu.kernel_bench.lab import Lab, checked
from kernels.layers import activations, layer_ops, norms, rotary_write
from kernels.layers.layer_ops import Rotary

SECTION = "layers"
EPS = 1e-5
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of an 8B LLaMA layer, with enough tokens that nothing stays in the L2 cache."""

    tokens: int = 16384
    hidden: int = 4096
    intermediate: int = 14336
    heads: tuple[int, int, int] = (32, 8, 128)


TINY = Sizes(tokens=3, hidden=64, intermediate=48, heads=(4, 2, 32))


@dataclass(frozen=True, slots=True)
class _Measured:
    case: str
    num_bytes: int
    launch: Launch
    check: Check


def measure(lab: Lab, figures: Figures) -> None:
    """Add all rows of the section."""
    sizes = TINY if lab.is_tiny else Sizes()
    makers: Sequence[Callable[[Lab, Sizes], _Measured]] = (_norm, _activation, _rotary)
    for make in makers:
        each = make(lab, sizes)
        us = lab.clock.launch_us([each.launch])
        figures.add(
            Figure(
                section=SECTION,
                case=each.case,
                unit="GB/s",
                value=each.num_bytes / us / 1e3,
                us=us,
                ceiling=figures.ceiling(COPY),
                check=each.check,
                note=f"{each.num_bytes / 1e6:.0f} MB",
            )
        )


def _norm(lab: Lab, sizes: Sizes) -> _Measured:
    x, residual = lab.random(sizes.tokens, sizes.hidden), lab.random(sizes.tokens, sizes.hidden)
    weight, kept = lab.random(sizes.hidden), residual.clone()
    exact = layer_ops.rms_norm((x + residual).float(), weight.float(), EPS)
    check = checked(norms.rms_norm(x, weight, EPS, kept), exact)
    num_bytes = 4 * x.numel() * x.itemsize  # both are read, sum and result written
    return _Measured("rms norm + residual", num_bytes, lambda: norms.rms_norm(x, weight, EPS, residual), check)


def _activation(lab: Lab, sizes: Sizes) -> _Measured:
    x = lab.random(sizes.tokens, 2 * sizes.intermediate)
    rows = x[:64].float()
    check = checked(activations.gated_activation(x[:64], "silu"), layer_ops.gated_activation(rows, "silu"))
    num_bytes = 3 * x.numel() // 2 * x.itemsize
    return _Measured("gated silu", num_bytes, lambda: activations.gated_activation(x, "silu"), check)


def _rotary(lab: Lab, sizes: Sizes) -> _Measured:
    num_heads, num_kv_heads, head_dim = sizes.heads
    query = lab.random(sizes.tokens, num_heads, head_dim)
    key, value = (lab.random(sizes.tokens, num_kv_heads, head_dim) for _ in range(2))
    angles = torch.rand(sizes.tokens, head_dim // 2, device=lab.device) * 6
    rotary = Rotary(angles.cos(), angles.sin())
    pool = lab.random(-(-sizes.tokens // BLOCK_SIZE), 2, BLOCK_SIZE, num_kv_heads, head_dim)
    key_cache, value_cache = pool[:, 0], pool[:, 1]
    slots = torch.randperm(sizes.tokens, generator=torch.Generator().manual_seed(0)).to(lab.device)
    turned, exact = query.clone(), query.float()
    rotary_write.rotate_and_write(turned, key, value, rotary, key_cache, value_cache, slots)
    expected = torch.zeros(pool.shape, device=lab.device)
    layer_ops.rotate_and_write(exact, key.float(), value.float(), rotary, expected[:, 0], expected[:, 1], slots)
    errors = [checked(turned, exact), checked(key_cache.flatten(0, 1)[slots], expected[:, 0].flatten(0, 1)[slots])]
    in_cache = 2 * sizes.tokens * num_kv_heads * head_dim
    num_bytes = 2 * (query.numel() + in_cache) * query.itemsize + 2 * angles.numel() * angles.itemsize
    return _Measured(
        "rotary + write of blocks",
        num_bytes,
        lambda: rotary_write.rotate_and_write(query, key, value, rotary, key_cache, value_cache, slots),
        max(errors, key=lambda check: check.max_error / check.allowed),
    )
