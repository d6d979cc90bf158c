"""Values fitted to a schema: what it refuses is left out, piece by piece, and nothing is invented. Sends nothing."""

from typing import Any, Final

from jsonschema import Draft202012Validator

LEFT_OUT: Final = object()  # in place of a value of which nothing fits


class Fitting:
    """Fits bodies to the operations of an OpenAPI document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._validators: dict[int, Draft202012Validator] = {}  # by the id of their schema, which the document keeps

    def has(self, path: str) -> bool:
        """True for a path of the document."""
        return path in self._document["paths"]

    def body(self, method: str, path: str, given: dict[str, Any]) -> dict[str, Any]:
        """The properties of a body that the operation takes, without those values in them that it refuses.

        It may lack what the operation requires. An unknown operation takes no property.
        """
        operation = self._document["paths"].get(path, {}).get(method.lower(), {})
        content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        properties = self._object_properties(content.get("schema", {}))
        return self._fitted_properties(given, properties)

    def value(self, given: Any, schema: dict[str, Any]) -> Any:
        """The value as far as the schema takes it, or LEFT_OUT."""
        if self._validator(schema).is_valid(given):
            return given
        if "$ref" in schema:
            return self.value(given, self._referred(schema["$ref"]))
        for alternative in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            if (found := self.value(given, alternative)) is not LEFT_OUT:
                return found
        made = self._pruned(given, schema)
        return made if made is not LEFT_OUT and self._validator(schema).is_valid(made) else LEFT_OUT

    def _pruned(self, given: Any, schema: dict[str, Any]) -> Any:
        if isinstance(given, float) and given.is_integer():
            return int(given)  # 1.0 is an integer in JSON Schema, and no number of tokens
        if isinstance(given, dict) and "properties" in schema:
            return self._fitted_properties(given, schema["properties"])
        if isinstance(given, list) and "items" in schema:
            made = [found for each in given if (found := self.value(each, schema["items"])) is not LEFT_OUT]
            return made[: schema.get("maxItems")]
        return LEFT_OUT

    def _fitted_properties(self, given: dict[str, Any], properties: dict[str, Any]) -> dict[str, Any]:
        made = {name: self.value(each, properties[name]) for name, each in given.items() if name in properties}
        return {name: each for name, each in made.items() if each is not LEFT_OUT}

    def _object_properties(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Properties of a body, which is one object or null."""
        if "$ref" in schema:
            return self._object_properties(self._referred(schema["$ref"]))
        for alternative in schema.get("anyOf", ()):
            if found := self._object_properties(alternative):
                return found
        properties: dict[str, Any] = schema.get("properties", {})
        return properties

    def _referred(self, reference: str) -> dict[str, Any]:
        found = self._document
        for name in reference.removeprefix("#/").split("/"):
            found = found[name]
        return found

    def _validator(self, schema: dict[str, Any]) -> Draft202012Validator:
        if id(schema) not in self._validators:
            within = {**schema, "components": self._document["components"]}  # so that its references are found
            self._validators[id(schema)] = Draft202012Validator(within)
        return self._validators[id(schema)]
