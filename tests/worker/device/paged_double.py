"""Attention over pages in plain torch, as the documents of attention libraries define it, for doubles of them."""

import math

import torch
from torch import Tensor


def attend_row(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One sequence, causal with the mask aligned to the bottom right corner; a query that sees no key gives zero.

    query: [Q, num_heads, head_dim]; keys, values: [K, num_kv_heads, head_dim]. In float32.
    """
    group, queries, num_keys = query.shape[1] // keys.shape[1], len(query), len(keys)
    seen = torch.arange(num_keys) <= torch.arange(queries)[:, None] + num_keys - queries
    out = torch.zeros(query.shape)
    for head in range(query.shape[1]):
        scores = query[:, head].float() @ keys[:, head // group].float().T * scale
        weights = scores.masked_fill(~seen, -math.inf).softmax(1)
        out[:, head] = torch.where(seen.any(1)[:, None], weights @ values[:, head // group].float(), 0.0)
    return out


def pages_of(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` tokens of a list of pages, [length, num_kv_heads, head_dim]; only these slots are read."""
    position = torch.arange(length)
    return cache[pages[position // cache.shape[1]].long(), position % cache.shape[1]]
