"""Sampling over rows of logits: edits, truncation, the draw, and log-probabilities, in plain torch.

The result of a row does not depend on the other rows, so a row gives the same token in every batch. Edits work in
place on float32 [S, V] that the caller owns; lists of edits are flat (row, token id) pairs. Knows nothing of seats,
requests or where the parameters come from.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.sampling.noise import gumbel, noise_bits

NO_THRESHOLD = torch.finfo(torch.float32).min  # keeps every token except barred ones, which are at -inf
_CHUNK_ELEMENTS = 1 << 17  # logits processed together on a CPU, so that their scratch stays in its cache
_DEVICE_CHUNK_ELEMENTS = 1 << 24  # elsewhere, so that scratch stays below a few hundred megabytes
_FIXED_POINT = 2.0**40  # 1.0 in fixed point
_NARROW = 128  # up to this width topk is faster than a sort


class TokenLogprobs(NamedTuple):
    """Log-probabilities of T tokens in each of n rows, under the model's distribution before any edit."""

    logprobs: Tensor  # float32 [n, T]
    ranks: Tensor  # int32 [n, T]; 1 + the number of strictly more likely tokens
    top_token_ids: Tensor  # int32 [n, k], most likely first; on a tie the lower id first
    top_logprobs: Tensor  # float32 [n, k]


def finite_rows(logits: Tensor) -> Tensor:
    """True, in a bool [S], for each row whose logits are all finite."""
    return logits.amax(-1).isfinite() & logits.amin(-1).isfinite()


def keep_masked(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Bar every token whose bit in `words` int32 [M, ceil(V / 32)] is 0, in `rows` int64 [M]."""
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_barred = ((words[:, :, None] >> bits) & 1).view(len(words), -1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill_(is_barred, -torch.inf)


def allow_only(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Bar every token that is not listed, in the rows that are listed."""
    kept = logits[rows, token_ids]
    named = torch.zeros(len(logits), dtype=torch.bool, device=logits.device).index_fill_(0, rows, True)
    logits.masked_fill_(named[:, None], -torch.inf)
    logits[rows, token_ids] = kept


def suppress(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    # Assigning a plain number by index would copy it to the device, and the host would wait.
    logits[rows, token_ids] = logits.new_full((), -torch.inf)


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, biases: Tensor) -> None:
    """Add `biases` [N]; each pair of row and token id occurs once."""
    logits[rows, token_ids] += biases


def scale(logits: Tensor, temperatures: Tensor) -> Tensor:
    """(logits - their maximum) / temperature, so the best token of a row is at 0; temperatures [S] > 0.

    A tiny temperature then gives -inf for the other tokens instead of an overflow.
    """
    smallest = torch.finfo(torch.float32).tiny
    return (logits - logits.amax(-1, keepdim=True)).div_(temperatures.clamp(min=smallest)[:, None])


def min_p_thresholds(min_p: Tensor) -> Tensor:
    """ln(min_p), float32 [S]: on scaled logits, exp(x) >= min_p means x >= ln(min_p). `min_p` is float64; 0 is off."""
    return min_p.log().clamp_(min=NO_THRESHOLD).to(torch.float32)


def truncation_thresholds(scaled: Tensor, floors: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> Tensor:
    """Lowest scaled logit, float32 [S], that `floors` (min-p), then top-k, then top-p keep.

    `scaled` [S, V] from `scale`; `floors` float32 [S]; `top_k` int64 [S] in [1, V], V is off; `top_p` float64 [S],
    1 is off; `width` is the largest of `top_k`. Top-p looks at the k largest values at or above the floor: it keeps a
    value while the larger ones have less than `top_p` of their probability. A threshold is a value, so equal logits
    are kept together: a tie at the edge keeps more than k tokens.
    """
    chunks = _row_chunks(scaled)
    return torch.cat([_thresholds(scaled[i], floors[i], top_k[i], top_p[i], width) for i in chunks])


def _thresholds(scaled: Tensor, floors: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> Tensor:
    ordered = _largest(scaled, width)
    num_kept = torch.minimum((ordered >= floors[:, None]).sum(-1), top_k).clamp_(min=1)[:, None]
    # Integers: their sums do not depend on the order of addition, so not on the device or the batch.
    weights = ordered.to(torch.float64).exp_().mul_(_FIXED_POINT).round_().to(torch.int64)
    sums = weights.cumsum(-1)
    limits = (sums.gather(1, num_kept - 1) * top_p[:, None]).ceil_().to(torch.int64)
    num_in_nucleus = torch.minimum(torch.searchsorted(sums, limits) + 1, num_kept)
    num_kept = torch.where(top_p[:, None] < 1, num_in_nucleus, num_kept)
    return ordered.gather(1, num_kept - 1)[:, 0]


def draw(scaled: Tensor, thresholds: Tensor, keys: Tensor) -> Tensor:
    """Draw a token of each row, int64 [S], from the softmax over the tokens at or above the threshold.

    Gumbel-max trick: the argmax of scaled logit + noise, in float64, lowest token id on a tie. `keys` int64 [S] on
    the device of `scaled`. `draw_dense` and `draw_sparse` differ in cost only.
    """
    if not scaled.is_cpu:
        return draw_dense(scaled, thresholds, keys)
    survives = scaled >= thresholds[:, None]
    if 4 * int(survives.sum()) < survives.numel():
        return draw_sparse(scaled, survives, keys)
    return torch.cat([draw_dense(scaled[i], thresholds[i], keys[i]) for i in _row_chunks(scaled)])


def draw_dense(scaled: Tensor, thresholds: Tensor, keys: Tensor) -> Tensor:
    """`draw` with noise for every token; never waits for the device."""
    token_ids = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)
    scores = gumbel(noise_bits(keys[:, None], token_ids)).add_(scaled)
    return scores.masked_fill_(scaled < thresholds[:, None], -torch.inf).argmax(-1)


def draw_sparse(scaled: Tensor, survives: Tensor, keys: Tensor) -> Tensor:
    """`draw` with noise only for tokens in `survives`, bool [S, V]; a row that keeps none gives token 0."""
    rows, token_ids = survives.nonzero(as_tuple=True)
    scores = gumbel(noise_bits(keys[rows], token_ids.to(torch.int32))).add_(scaled[rows, token_ids])
    best = torch.full((len(scaled),), -torch.inf, dtype=scores.dtype, device=scores.device)
    best.scatter_reduce_(0, rows, scores, "amax")
    wins = scores == best[rows]
    chosen = torch.zeros(len(scaled), dtype=torch.int64, device=scores.device)
    return chosen.scatter_reduce_(0, rows[wins], token_ids[wins], "amin", include_self=False)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """Log-probabilities of `token_ids` int64 [n, T] and of the `num_top` most likely tokens, from raw logits.

    `logits` float32 [n, V]; more than V tokens are never returned.
    """
    logprobs = model_logprobs(logits)
    top_token_ids = best_tokens(logits, min(num_top, logits.shape[1]))
    return TokenLogprobs(
        logprobs=logprobs.gather(1, token_ids),
        ranks=token_ranks(logits, token_ids),
        top_token_ids=top_token_ids.to(torch.int32),
        top_logprobs=logprobs.gather(1, top_token_ids),
    )


def model_logprobs(logits: Tensor) -> Tensor:
    """Log-softmax of raw logits, float32 [n, V]."""
    return _aligned(logits).log_softmax(-1)[:, : logits.shape[1]]


def token_ranks(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Ranks, int32 [n, k], of `token_ids` int64 [n, k]: 1 + the number of strictly more likely tokens."""
    own = logits.gather(1, token_ids)
    if own.shape[1] == 1:
        return (logits > own).sum(-1, keepdim=True, dtype=torch.int32).add_(1)
    ranks = torch.empty_like(own, dtype=torch.int32)
    for row in range(len(logits)):  # [k, V] at a time
        ranks[row] = (logits[row] > own[row, :, None]).sum(-1, dtype=torch.int32).add_(1)
    return ranks


def best_tokens(logits: Tensor, num_best: int) -> Tensor:
    """Token ids with the largest logits, int64 [n, num_best], at most V: by descending logit, then ascending id."""
    if num_best == 0 or len(logits) == 0:
        return torch.empty(len(logits), num_best, dtype=torch.int64, device=logits.device)
    if not logits.is_cpu or num_best == logits.shape[1]:
        return _best_by_key(logits, num_best)
    # topk is four times as fast, but does not define which of several equal logits at the edge it takes.
    values, token_ids = logits.topk(num_best + 1)
    is_open = values[:, -2] == values[:, -1]
    token_ids, order = token_ids[:, :-1].sort(dim=-1)
    order = values.gather(1, order).sort(dim=-1, descending=True, stable=True).indices
    token_ids = token_ids.gather(1, order)
    if is_open.any():
        token_ids[is_open] = _best_by_key(logits[is_open], num_best)
    return token_ids


def _best_by_key(logits: Tensor, num_best: int) -> Tensor:
    """`best_tokens` through one integer key that holds logit and id; never waits for the device."""
    last = logits.shape[1] - 1
    reversed_ids = torch.arange(last, -1, -1, device=logits.device)
    best = [_ordered_keys(logits[i], reversed_ids).topk(num_best).values for i in _row_chunks(logits)]
    return last - (torch.cat(best) & 0xFFFFFFFF)


def _row_chunks(scaled: Tensor) -> list[slice]:
    """Slices of rows to process together."""
    num_rows, vocab_size = scaled.shape
    size = max(1, (_CHUNK_ELEMENTS if scaled.is_cpu else _DEVICE_CHUNK_ELEMENTS) // vocab_size)
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def _ordered_keys(logits: Tensor, reversed_ids: Tensor) -> Tensor:
    """Distinct keys, int64 [n, V], in the order of the logits and then of the reversed ids."""
    bits = (logits + 0.0).view(torch.int32)  # adding 0 makes -0 and 0 the same
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ascending.to(torch.int64) << 32) + reversed_ids


def _aligned(logits: Tensor) -> Tensor:
    """Pad so that every row begins aligned: a GPU's order of addition depends on the row's address."""
    missing = -logits.shape[1] % 8
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def _largest(scaled: Tensor, width: int) -> Tensor:
    """The `width` largest values of each row in descending order.

    On a CPU numpy's vectorised sort of values is over 20 times as fast as torch's, which carries the indices.
    """
    if not scaled.is_cpu or width <= _NARROW:
        return scaled.topk(width).values
    return torch.from_numpy(np.sort(scaled.neg().numpy(), axis=-1)[:, :width]).neg()
