"""In which form the weights of a model are kept on a CPU: packed for the products, or as they are read."""

from typing import NamedTuple

import torch

from worker_svc.host import onednn_linear
from worker_svc.host.onednn_linear import OneDnnLinear
from worker_svc.model.layers import Linear, MakeProduct


class Packing(NamedTuple):
    """A way to keep weights."""

    name: str  # for logs
    make_product: MakeProduct
    shortcoming: str | None = None  # why it is not a faster one


def choose_packing(dtype: torch.dtype) -> Packing:
    """The fastest way that works on this machine; tries it with a small product."""
    reason = onednn_linear.supports(dtype)
    if reason is None:
        return Packing("onednn", OneDnnLinear)
    return Packing("plain", Linear, reason)
