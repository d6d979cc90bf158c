"""JSON schemas that are put into others: references within them are rewritten, so that they mean what they meant.

Knows no grammar. What a schema says besides references is left as it is, whether or not it is valid.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urldefrag, urljoin

_HEAD = ("$id", "$schema")  # belong to the root of a document
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_VALUES = frozenset({"const", "enum", "default", "example", "examples"})


def nested(schema: Mapping[str, Any], place: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parts of a schema that the root of an outer one must have, and the schema as it stands at its place there.

    Args:
        schema: a whole document.
        place: JSON pointer within the outer schema.
    """
    head = {name: schema[name] for name in _HEAD if name in schema}
    inner = {name: value for name, value in schema.items() if name not in _HEAD}
    return head, _Mover(schema.get("$id"), place).schema(inner)


class _Mover:
    """Rewrites references to a document by which it was a root."""

    def __init__(self, own_id: object, place: str) -> None:
        self._base = own_id if isinstance(own_id, str) else ""
        self._place = place

    def schema(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._keyword(name, value) for name, value in schema.items()}

    def _keyword(self, name: str, value: Any) -> Any:
        if name in _VALUES:
            return value
        if name == "$ref" and isinstance(value, str):
            return self._reference(value)
        if name in _MAPS and isinstance(value, Mapping):  # of which any names are keys, also those of keywords
            return {key: self._part(each) for key, each in value.items()}
        return self._part(value)

    def _part(self, value: Any) -> Any:
        """A schema, or several; a schema with an id of its own is a document, whose references are to itself."""
        if isinstance(value, Mapping):
            return dict(value) if _is_document(value) else self.schema(value)
        return [self._part(each) for each in value] if isinstance(value, list) else value

    def _reference(self, reference: str) -> str:
        try:
            document, fragment = urldefrag(urljoin(self._base, reference))
            is_own = document == urldefrag(self._base).url
        except ValueError:  # no address
            return reference
        if not is_own or fragment[:1] not in ("", "/"):  # of another document, or an anchor
            return reference
        return f"#{self._place}{fragment}"


def _is_document(schema: Mapping[str, Any]) -> bool:
    own_id = schema.get("$id")
    return isinstance(own_id, str) and not own_id.startswith("#")
