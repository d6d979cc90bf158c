"""Constraint of a request on its output's text: checked, and written as the grammar that workers get.

Pure. Whether the grammar compiles for the served model is found by `scheduler_svc.text.grammar_trial`.
"""

import json
from typing import Any

from llguidance import LLMatcher

from common.bounds import MOST_CONSTRAINT_BYTES
from common.violations import Violations
from quire.v1 import inference_pb2 as pb

_COMPACT: Any = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_FLEXIBLE: Any = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n[ \t]{0,16})?"}
_ANY_OBJECT = {"type": "object"}
_DECIDES = (
    "contradicts a structured output, or calls that are forced or strict, which decide where the output ends: "
    "leave either out"
)


def check_structured_output(request: pb.GenerateRequest, violations: Violations) -> None:
    """Add the violations of a request's constraint; whether its grammar can be compiled is not looked at."""
    output, field = request.structured_output, "structured_output"
    kind = output.WhichOneof("kind")
    if kind is None or (kind == "json_object" and not output.json_object):
        violations.add(field, "is empty: give json_schema, json_object, regex, choice or lark")
    elif kind == "choice":
        _check_choice(output.choice, violations)
    elif kind != "json_object" and not getattr(output, kind):
        violations.add(f"{field}.{kind}", "is empty: give a text, or leave structured_output out")
    if output.json_whitespace not in pb.JsonWhitespace.values():
        violations.add(f"{field}.json_whitespace", f"is {output.json_whitespace}: COMPACT is 1, FLEXIBLE 2")
    for name, is_given in {
        "stopping.ignore_eos": request.stopping.ignore_eos,
        "stopping.min_tokens": bool(request.stopping.min_tokens),
        "sampling.allowed_token_ids": bool(request.sampling.allowed_token_ids),
    }.items():
        if is_given:
            violations.add(name, _DECIDES)
    if output.json_schema:
        try:
            grammar_of(output)
        except ValueError as error:
            violations.add(f"{field}.json_schema", f"cannot be read: {error!s:.200}")


def grammar_of(output: pb.StructuredOutput) -> str:
    """Grammar of a constraint, as JSON for llguidance. Raises ValueError for a schema that is no JSON object."""
    match output.WhichOneof("kind"):
        case "json_schema":
            return _of_schema(output.json_schema, output.json_whitespace)
        case "json_object":
            return _of_schema(json.dumps(_ANY_OBJECT), output.json_whitespace)
        case "regex":
            return LLMatcher.grammar_from_regex(output.regex)
        case "choice":
            return _of_lark("start: " + " | ".join(json.dumps(each) for each in output.choice.texts))
        case "lark":
            return _of_lark(output.lark)
    return ""


def _check_choice(choice: pb.Choice, violations: Violations) -> None:
    field = "structured_output.choice.texts"
    if not choice.texts:
        violations.add(field, "is empty: give at least one text")
    violations.add_each((f"{field}[{i}]", "is empty: give a text") for i, text in enumerate(choice.texts) if not text)
    num_bytes = sum(len(text.encode()) for text in choice.texts)
    if num_bytes > MOST_CONSTRAINT_BYTES:
        violations.add(field, f"have {num_bytes:,} bytes together: give at most {MOST_CONSTRAINT_BYTES:,}")


def _of_schema(schema: str, whitespace: int) -> str:
    if whitespace == pb.JSON_WHITESPACE_FLEXIBLE:
        return LLMatcher.grammar_from_json_schema(schema, overrides=_FLEXIBLE)
    return LLMatcher.grammar_from_json_schema(schema, overrides=_COMPACT)


def _of_lark(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]}, ensure_ascii=False)
