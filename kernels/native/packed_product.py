"""Matrix products in native code, with weights that are packed once: unchanged, or rounded to int8 per output.

A row's result does not depend on the other rows, to the last bit. Knows no layers.
"""

import os
from collections.abc import Mapping
from ctypes import CDLL, c_int, c_int64, c_void_p
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.native.cpu_kernels import GreedyTokens
from kernels.native.host_memory import zeros_as_used
from kernels.native.library import load_library
from kernels.native.program import CHOOSE, PRODUCT, address, call
from kernels.products.output_slices import output_slices

_INT8_MAX = 127
_SIGNATURES = {
    "quire_packed_size": (c_int64, (c_int64, c_int64, c_int, c_int)),
    "quire_pack": (None, (c_void_p, c_int64, c_int64, c_void_p, c_int, c_int, c_int)),
}


class PackedProduct:
    """x W^T + b. The weight is kept in packed form only; one thread at a time may multiply."""

    __slots__ = ("_bias", "_call", "_fields", "_outputs", "_packed", "_scales")

    def __init__(
        self, library: CDLL, weight: Tensor, bias: Tensor | None, scales: Tensor | None, dtype: torch.dtype
    ) -> None:
        """Pack for rows of `dtype`, float32 or bfloat16, which bias and results have too.

        weight: [out, in], contiguous, of `dtype` or int8; scales: [out] float32, with int8; bias: [out]
        """
        assert weight.is_contiguous(), "packed from contiguous rows"
        assert (scales is None) == (weight.dtype != torch.int8), "int8 has scales, and nothing else has"
        self._outputs, num_inputs = weight.shape
        num_threads = torch.get_num_threads()
        kinds = (dtype == torch.bfloat16, scales is not None)
        self._packed = zeros_as_used((library.quire_packed_size(*weight.shape, *kinds),), weight.dtype)
        library.quire_pack(weight.data_ptr(), *weight.shape, self._packed.data_ptr(), *kinds, num_threads)
        self._scales, self._bias = scales, bias
        self._call = partial(call, library, num_threads)
        self._fields: dict[str, Any] = {
            "num_inputs": num_inputs,
            "num_outputs": self._outputs,
            "first": self._packed.data_ptr(),
            "second": address(scales),
            "third": address(bias),
        }

    @property
    def nbytes(self) -> int:
        """Memory of weight, scales and bias, in bytes."""
        return sum(each.nbytes for each in (self._packed, self._scales, self._bias) if each is not None)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply, into `out` if given. x: [T, in]"""
        if out is None:
            out = x.new_empty(len(x), self._outputs)
        self._call(PRODUCT, x, out, **self._fields)
        return out

    def choose(self, x: Tensor, out: GreedyTokens) -> None:
        """Do `CpuKernels.greedy` on the product without storing the product. x: [L, in]"""
        self._call(CHOOSE, x, out.token_ids, finite=out.is_finite.data_ptr(), **self._fields)


class ProductMaker:
    """Packs weights of one dtype for the native product."""

    def __init__(self, environment: Mapping[str, str] = os.environ, *, int8: bool = False) -> None:
        """Raises NativeUnavailableError, with the reason why there are no native kernels."""
        self._library = load_library(environment)
        self._int8 = int8
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments

    def __call__(self, weight: Tensor, bias: Tensor | None) -> PackedProduct:
        """Pack a weight [out, in]."""
        assert weight.dtype in (torch.float32, torch.bfloat16), f"no native product in {weight.dtype}"
        if not self._int8:
            return PackedProduct(self._library, weight.contiguous(), bias, None, weight.dtype)
        rounded, scales = rounded_to_int8(weight)
        return PackedProduct(self._library, rounded, bias, scales, weight.dtype)


def rounded_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize symmetrically per output: weight ~ int8 * scale. Returns int8 [out, in] and float32 [out].

    Some outputs at a time: as float32, with copies, the matrix of a large vocabulary takes more than the whole model.
    """
    rounded, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    begin = 0
    for part in output_slices(weight):
        end = begin + len(part)
        wide = part.float()
        largest = wide.abs().amax(dim=1) / _INT8_MAX
        scales[begin:end] = torch.where(largest > 0, largest, 1.0)
        rounded[begin:end] = (wide / scales[begin:end].unsqueeze(1)).round_()
        begin = end
    return rounded, scales
