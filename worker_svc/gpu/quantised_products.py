"""Products whose weights are kept in 8 or 4 bits, and which products those are.

`--weight-dtype` chooses a form for the four products of each layer. What stays in the model's dtype: the embedding,
the head and projections of embeddings, which decide single tokens; norms and biases, which are small; products whose
shape does not fit. The forward pass sees products alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

from torch import Tensor

from kernels.products import fp8_product, int4_matrix
from kernels.products.fp8_product import Fp8Matrix
from kernels.products.int4_matrix import Int4Matrix
from kernels.products.int4_tiling import arrival_counters
from worker_svc.model.decoder import Decoder
from worker_svc.model.layers import LayersOnly, Linear, MakeProduct, Product
from worker_svc.operations import Operations

QuantisedForm = Literal["fp8", "int4"]


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """The product with a weight of e4m3, for rows that are quantised as they come."""

    weight: Fp8Matrix
    bias: Tensor | None  # [out]
    quantise_rows: Callable[[Tensor], Fp8Matrix] = fp8_product.quantise_rows

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Self:
        """Quantise a weight [out, in]."""
        return cls(fp8_product.quantise_weight(weight), fp8_product.fixed_bias(weight, bias))

    @property
    def nbytes(self) -> int:
        return _nbytes(*self.weight, self.bias)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return fp8_product.fp8_product(self.quantise_rows(x), self.weight, self.bias, x.dtype)

    def with_operations(self, operations: Operations) -> Self:
        """The same product, computed by these operations."""
        return replace(self, quantise_rows=operations.quantise_rows)


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """The product with a weight of 4 bits in groups of inputs, for rows as they are."""

    weight: Int4Matrix
    bias: Tensor | None  # [out]
    num_arrived: Tensor  # counters of the kernel
    multiply: Callable[[Tensor, Int4Matrix, Tensor | None, Tensor], Tensor] = int4_matrix.int4_product

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Self:
        """Quantise a weight [out, in]."""
        return cls(int4_matrix.quantise_weight(weight), bias, arrival_counters(len(weight), weight.device))

    @property
    def nbytes(self) -> int:
        return _nbytes(*self.weight, self.bias, self.num_arrived)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self.multiply(x, self.weight, self.bias, self.num_arrived)

    def with_operations(self, operations: Operations) -> Self:
        """The same product, computed by these operations."""
        return replace(self, multiply=operations.int4_product)


def quantising_maker(form: QuantisedForm) -> LayersOnly:
    """Maker of a decoder's products, which quantises each matrix as it is read."""
    return LayersOnly(_MAKERS[form])


def num_products(decoder: Decoder) -> tuple[int, int]:
    """Count the products of the layers that are quantised, and all of them."""
    products = [each for layer in decoder.layers for each in layer.products]
    return sum(isinstance(each, Fp8Linear | Int4Linear) for each in products), len(products)


def with_operations(decoder: Decoder, operations: Operations) -> Decoder:
    """The decoder, with its quantised products computed by these operations."""
    return decoder.with_layer_products(
        lambda each: each.with_operations(operations) if isinstance(each, Fp8Linear | Int4Linear) else each
    )


def _make_fp8(weight: Tensor, bias: Tensor | None) -> Product:
    fits = all(size % fp8_product.ALIGNMENT == 0 for size in weight.shape)
    return Fp8Linear.of(weight, bias) if fits else Linear(weight, bias)


def _make_int4(weight: Tensor, bias: Tensor | None) -> Product:
    fits = weight.shape[1] % int4_matrix.GROUP == 0
    return Int4Linear.of(weight, bias) if fits else Linear(weight, bias)


_MAKERS: Mapping[QuantisedForm, MakeProduct] = {"fp8": _make_fp8, "int4": _make_int4}
# What is wrong with the shape of a product that does not fit.
MISFITS: Mapping[QuantisedForm, str] = {
    "fp8": f"inputs or outputs are no multiple of {fp8_product.ALIGNMENT}",
    "int4": f"inputs are no multiple of {int4_matrix.GROUP}",
}


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
