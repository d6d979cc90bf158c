"""Reads the rotary position embeddings of config.json, with the semantics of `transformers`."""

import math

from worker_svc.checkpoint.json_file import JsonTable
from worker_svc.model.config import Llama3Scaling, RopeConfig, YarnScaling

_DEFAULT_THETA = 10_000.0
_MOST_THETA = 1e15
_MOST_FACTOR = 1e6
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ORIGINAL = "original_max_position_embeddings"


def read_rope(raw: JsonTable, max_positions: int, most_positions: int) -> RopeConfig:
    """Read `rope_scaling`, else `rope_parameters`, with the `rope_theta` beside them as default.

    Raises CheckpointError for a kind that is not supported.
    """
    spelled = _spelled(raw)
    theta = raw.number("rope_theta", _DEFAULT_THETA, above=0.0, most=_MOST_THETA)
    theta = spelled.number("rope_theta", theta, above=0.0, most=_MOST_THETA)
    for table in (spelled, raw):
        if table.number("partial_rotary_factor", 1.0) != 1.0:
            table.refuse("partial_rotary_factor", "is supported as 1 only", "choose another checkpoint")
    kind_key = "rope_type" if "rope_type" in spelled else "type"
    kind = spelled.text(kind_key, "default")
    if kind in ("default", "dynamic"):  # they differ only beyond max_position_embeddings, which is never served
        if kind == "dynamic":
            _factor(spelled)
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, linear_factor=_factor(spelled))
    if kind not in _KINDS:
        spelled.refuse(kind_key, f"only {', '.join(_KINDS)} are supported", "choose another checkpoint")
    original = spelled.integer(_ORIGINAL, max_positions, most=most_positions)
    original = raw.integer(_ORIGINAL, original, most=most_positions)
    if kind == "llama3":
        return RopeConfig(theta=theta, llama3=_llama3(spelled, original))
    if theta <= 1.0:
        (spelled if "rope_theta" in spelled else raw).refuse("rope_theta", "must be greater than 1 with yarn")
    return RopeConfig(theta=theta, yarn=_yarn(spelled, original, max_positions))


def extended_positions(raw: JsonTable, rope: RopeConfig, max_positions: int, most_positions: int) -> int:
    """Longest sequence that the scaling is for: with yarn it may be more than `max_position_embeddings`.

    Files that switch yarn on say it by factor and original length, and may leave `max_position_embeddings` as it was.
    Without an original length nothing says that `max_position_embeddings` is not the extended one. The same holds for
    linear scaling. Raises CheckpointError for more than `most_positions`.
    """
    spelled = _spelled(raw)
    if rope.yarn is None or (_ORIGINAL not in spelled and _ORIGINAL not in raw):
        return max_positions
    extended = int(rope.yarn.original_max_positions * rope.yarn.factor)
    if extended > most_positions:
        spelled.refuse(
            "factor", f"{_ORIGINAL} {rope.yarn.original_max_positions} times it may be at most {most_positions}"
        )
    return max(max_positions, extended)


def _spelled(raw: JsonTable) -> JsonTable:
    """The table of rotary parameters, empty if there is none."""
    for key in ("rope_scaling", "rope_parameters"):
        table = raw.table(key)
        if table is not None and table.keys:
            nested = next((name for name in _LAYER_TYPES if name in table), None)
            if nested is not None:
                table.refuse(nested, "rotary embeddings that differ by layer are not supported", "choose another")
            return table
    return JsonTable("config.json: rope_parameters", {})


def _factor(spelled: JsonTable) -> float:
    return spelled.number("factor", above=0.0, most=_MOST_FACTOR)


def _llama3(spelled: JsonTable, original: int) -> Llama3Scaling:
    low = spelled.number("low_freq_factor", above=0.0, most=_MOST_FACTOR)
    high = spelled.number("high_freq_factor", above=0.0, most=_MOST_FACTOR)
    if high <= low:
        spelled.refuse("high_freq_factor", f"must be greater than low_freq_factor, {low:g}")
    return Llama3Scaling(
        factor=_factor(spelled), low_freq_factor=low, high_freq_factor=high, original_max_positions=original
    )


def _yarn(spelled: JsonTable, original: int, max_positions: int) -> YarnScaling:
    factor = max_positions / original if spelled.is_null("factor") else _factor(spelled)
    return YarnScaling(
        factor=factor,
        beta_fast=_beta(spelled, "beta_fast", 32.0),
        beta_slow=_beta(spelled, "beta_slow", 1.0),
        original_max_positions=original,
        attention_factor=_attention_factor(spelled, factor),
        truncate=spelled.flag("truncate", True),
    )


def _beta(spelled: JsonTable, key: str, default: float) -> float:
    return default if spelled.is_null(key) else spelled.number(key, default, above=0.0, most=_MOST_FACTOR)


def _attention_factor(spelled: JsonTable, factor: float) -> float:
    if "attention_factor" in spelled:
        return spelled.number("attention_factor", above=0.0, most=_MOST_FACTOR)
    mscale, of_all = (_mscale(spelled, key) for key in ("mscale", "mscale_all_dim"))
    if mscale and of_all:
        return _magnitude(factor, mscale) / _magnitude(factor, of_all)
    return _magnitude(factor, 1.0)


def _mscale(spelled: JsonTable, key: str) -> float:
    """The value of a key; 0 if it is absent."""
    if spelled.raw(key) in (None, 0):
        return 0.0
    return spelled.number(key, above=0.0, most=_MOST_FACTOR)


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
