"""Faults of grammars of answers with calls, told by the schemas that they are due to instead of by the grammar.

The grammar's compiler names a line; each schema has a line of its own.
"""

import re

import quire
from gateway_svc.tool_use import ToolUse
from quire.params import GenerateParams
from quire.parsing.tool_grammar import schema_of_rule

_AT_LINE = re.compile(r"cannot be used: at (\d+)\(\d+\): failed to compile JSON schema: (.*?)(?: \d+ \| |…|$)")


class GrammarFaults:
    """Faults of the grammar of one request; knows which line of it is whose."""

    def __init__(self, keywords: GenerateParams, tool_use: ToolUse) -> None:
        """`keywords` of the request: they have the grammar, if there is one."""
        self._grammar = keywords.get("lark") or ""
        self._tool_use = tool_use

    def told(self, error: quire.QuireError) -> quire.QuireError:
        """The error by the field of a schema, if it is due to one; else as it is."""
        if not isinstance(error, quire.InvalidRequestError):
            return error
        for each in error.violations:
            found = _AT_LINE.match(each.description)
            if found is not None and (field := self._field_of(int(found[1]))) is not None:
                return quire.InvalidRequestError.of([quire.FieldViolation(field, f"cannot be used: {found[2]}")])
        return error

    def _field_of(self, line: int) -> str | None:
        """Field of the schema in a line, numbered from 1."""
        lines = self._grammar.split("\n")
        rule = lines[line - 1].partition(":")[0] if line <= len(lines) else ""
        owner = schema_of_rule(rule)
        if owner == "content":
            return "json_schema"
        return None if owner is None else self._tool_use.schema_field(owner)
