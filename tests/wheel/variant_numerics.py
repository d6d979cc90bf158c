"""Results of an installed wheel's native kernels against torch: `python -m tests.wheel.variant_numerics NAME`.

NAME is the variant that they must be. Ends with a traceback where they are not, or compute something else.
"""

import sys

import torch

from kernels.native.native_kernels import native_kernels
from kernels.native.packed_product import ProductMaker, rounded_to_int8
from tests.kernels.native.attention_cases import DECODE, PREFILL, SLACK, attention_case

_ROWS, _INPUTS, _OUTPUTS = 25, 300, 67


def main() -> None:
    """Attention and products in both dtypes, and products with weights in int8."""
    (name,) = sys.argv[1:]
    kernels = native_kernels()
    assert kernels.name.endswith(f"built for {name}"), kernels.name
    for dtype, slack in SLACK.items():
        for spans in (DECODE, PREFILL):
            case = attention_case(kernels, spans, dtype=dtype)
            error, own = case.error(kernels)
            assert error <= 2 * own + slack, (name, dtype, error, own)
        _check_products(dtype)
    sys.stdout.write(f"{kernels.name}\n")


def _check_products(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_OUTPUTS, _INPUTS, generator=generator).to(dtype)
    rows = torch.randn(_ROWS, _INPUTS, generator=generator).to(dtype)
    rounded, scales = rounded_to_int8(weight)
    for make, exact_weight in (
        (ProductMaker(), weight.double()),
        (ProductMaker(int8=True), rounded.double() * scales.double().unsqueeze(1)),
    ):
        exact = rows.double() @ exact_weight.t()
        allowed = torch.finfo(dtype).eps * exact.abs() + _INPUTS * 2**-24 * (
            rows.double().abs() @ exact_weight.abs().t()
        )
        assert ((make(weight, None)(rows).double() - exact).abs() <= allowed).all(), dtype


if __name__ == "__main__":
    main()
