"""Products with weights that oneDNN packs once for any number of rows, through torch's private operators.

The operators may be missing, or refuse a dtype that the processor has no instructions for; `supports` tries them.
"""

import torch
from torch import Tensor

from worker_svc.model.layers import Linear

_TRIAL_SIZE = 32


class OneDnnLinear:
    """x W^T + b. The weight is kept in packed form only."""

    __slots__ = ("_bias", "_packed", "nbytes")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out, in]; bias: [out]"""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias
        self.nbytes = Linear(weight, bias).nbytes  # what torch packs has no size of its own

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The operator allocates its result: `out` is not used."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product


def supports(dtype: torch.dtype) -> str | None:
    """Reason why weights of this dtype cannot be packed here; None if they can."""
    weight = torch.eye(_TRIAL_SIZE, dtype=dtype)
    x = torch.arange(2 * _TRIAL_SIZE, dtype=dtype).view(2, -1)
    bias = torch.ones(_TRIAL_SIZE, dtype=dtype)
    try:
        product = OneDnnLinear(weight, bias)(x)
    except (AttributeError, RuntimeError, NotImplementedError) as error:  # no such operator, or no such instructions
        return str(error).partition("\n")[0]
    return None if torch.equal(product, Linear(weight, bias)(x)) else "the product is wrong"
