"""Parts of another server's OpenAPI document that cases for the gateway are made of. Sends nothing."""

import json
import re
from typing import Any

_REFERENCE = re.compile(r'"#/components/([^/"]+)/([^/"]+)')


def shared_document(theirs: dict[str, Any], ours: dict[str, Any], *, has_other_types: bool) -> dict[str, Any]:
    """Document of theirs with the operations that ours has, too, behind `/v1`.

    Without `has_other_types` there are no alternatives of a `type` that ours does not know, such as tools that a server
    would run and files of another host. `not` is left out, since no cases can be made of it.
    """
    of_ours = {_without_names(path): each for path, each in ours["paths"].items()}
    paths = {
        path: {
            method: each
            for method, each in operations.items()
            if method in of_ours.get(_without_names(f"/v1{path}"), {})
        }
        for path, operations in theirs["paths"].items()
    }
    paths = {path: operations for path, operations in paths.items() if operations}
    pruning = _Pruning(theirs["components"], None if has_other_types else _types(ours))
    paths = pruning.schema(paths)
    return {**theirs, "paths": paths, "components": pruning.used_components(paths)}


class _Pruning:
    """Leaves out of schemas what no cases are to be made of."""

    def __init__(self, components: dict[str, Any], known: set[str] | None) -> None:
        self._components = components
        self._known = known  # types; None: all

    def schema(self, given: Any) -> Any:
        """The schema, or anything that has schemas in it."""
        if isinstance(given, list):
            return [self.schema(each) for each in given]
        if not isinstance(given, dict):
            return given
        made = {name: self.schema(each) for name, each in given.items() if name not in ("not", "discriminator")}
        for name in {"anyOf", "oneOf"} & made.keys():
            made[name] = [each for each in made[name] if not self._is_of_other_type(each)] or made[name]
        return made

    def used_components(self, paths: dict[str, Any]) -> dict[str, Any]:
        """The components that these paths refer to, directly or not: reading all of a large document takes minutes."""
        used: dict[str, Any] = {}
        found = _REFERENCE.findall(json.dumps(paths))
        while found:
            kind, name = found.pop()
            if name not in used.setdefault(kind, {}):
                used[kind][name] = self.schema(self._components[kind][name])
                found += _REFERENCE.findall(json.dumps(used[kind][name]))
        return used

    def _is_of_other_type(self, schema: dict[str, Any]) -> bool:
        if reference := _REFERENCE.match(json.dumps(schema.get("$ref"))):
            kind, name = reference.groups()
            return self._is_of_other_type(self._components[kind][name])
        types = _values(schema.get("properties", {}).get("type", {}))
        return self._known is not None and bool(types) and types.isdisjoint(self._known)


def _types(document: Any) -> set[str]:
    """Values of all properties named `type` that have a choice of them."""
    if isinstance(document, list):
        return set().union(*map(_types, document))
    if not isinstance(document, dict):
        return set()
    own = document.get("properties", {})
    found = _values(own["type"]) if isinstance(own, dict) and isinstance(own.get("type"), dict) else set()
    return found.union(*map(_types, document.values()))


def _values(schema: dict[str, Any]) -> set[str]:
    return {*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())}


def _without_names(path: str) -> str:
    """The path without the names of its parameters."""
    return re.sub(r"\{[^}]*\}", "{}", path)
