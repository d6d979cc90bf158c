"""Bounds of fields that the scheduler enforces, added to the schemas of bodies, whose types the gateway checks.

Those of lists, texts and sampling parameters are read from the tables that the scheduler reads, too.
"""

import math
from typing import Any

from common.bounds import BOUNDS, MOST_SAMPLES
from common.sampling_params import NUMERIC_PARAMS

_UINT32 = {"minimum": 0, "maximum": 2**32 - 1}
_INT64 = {"minimum": -(2**63), "maximum": 2**64 - 1}  # as the body's reader takes whole numbers
_NAMES = "quire.v1.GenerateRequest."
# Fields of bodies by the wire's fields that they become, whose bounds hold for them.
_ON_WIRE = {
    "tenant": f"{_NAMES}tenant",
    "cache_salt": f"{_NAMES}cache_salt",
    "logit_bias": "quire.v1.SamplingParams.logit_bias",
    "allowed_token_ids": "quire.v1.SamplingParams.allowed_token_ids",
    "stop": "quire.v1.StoppingParams.stop",
    "stop_sequences": "quire.v1.StoppingParams.stop",
    "stop_token_ids": "quire.v1.StoppingParams.stop_token_ids",
    "choice": "quire.v1.Choice.texts",
    "tool_call_id": "quire.v1.ChatMessage.tool_call_id",
    "call_id": "quire.v1.ToolCall.id",
    "tokens": "quire.v1.DetokenizeRequest.token_ids",
}
_MOST_TOKENS = {"maximum": 2**32 - 1}
_RANGES: dict[str, dict[str, Any]] = {
    **{
        each.name: {"exclusiveMinimum" if each.is_low_excluded else "minimum": each.low}
        | ({"maximum": each.high} if each.high != math.inf else {})
        for each in NUMERIC_PARAMS
    },
    "top_k": {"minimum": -1, "maximum": 2**32 - 1},  # 0 and -1 stand for all tokens
    "first_sample_index": _UINT32,
    "min_tokens": _UINT32,
    "seed": _INT64,
    "max_tokens": _MOST_TOKENS,
    "max_completion_tokens": _MOST_TOKENS,
    "max_output_tokens": _MOST_TOKENS,
    "priority": {"minimum": -1000, "maximum": 1000},
    "beam_width": {"minimum": 2, "maximum": 64},
    "length_penalty": {"minimum": -4, "maximum": 4},
    "best_of": {"minimum": 1, "maximum": MOST_SAMPLES},
    "timeout_s": {"exclusiveMinimum": 0, "exclusiveMaximum": 1e9},
}


def add_bounds(schemas: dict[str, Any]) -> None:
    """Add bounds to the properties of these schemas, by their names."""
    for schema in schemas.values():
        for name, described in schema.get("properties", {}).items():
            for one in described.get("anyOf", (described,)):
                _add(one, name)


def _add(described: dict[str, Any], name: str) -> None:
    """Add the bounds of a field to one of its alternatives."""
    match described.get("type"):
        case "number" | "integer" if name in _RANGES:
            described.update(_RANGES[name])
        case "string" if name in _ON_WIRE:
            described.update(_of_text(_ON_WIRE[name]))
        case "array" if name in _ON_WIRE:
            described["maxItems"] = BOUNDS[_ON_WIRE[name]].max_items
            if described["items"].get("type") == "string":
                described["items"] = described["items"] | {"minLength": 1} | _of_text(_ON_WIRE[name])
        case "object" if name in _ON_WIRE:
            described["maxProperties"] = BOUNDS[_ON_WIRE[name]].max_items
            described["propertyNames"] = {"pattern": "^[0-9]{1,10}$"}  # token ids


def _of_text(field: str) -> dict[str, int]:
    """Bounds of a text: characters, or bytes, of which it has at least as many."""
    bound = BOUNDS[field]
    most = bound.max_chars if bound.max_chars is not None else bound.max_bytes
    return {} if most is None else {"maxLength": most}
