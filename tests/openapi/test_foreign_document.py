"""Another server's document, cut to what the gateway has."""

from typing import Any

from tests.gateway.described import DOCUMENT
from tests.openapi.foreign_document import shared_document


def kind(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"type": {"enum": [name]}, "x": {"not": {"const": 1}}}}


def reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


THEIRS: dict[str, Any] = {
    "openapi": "3.1.0",
    "paths": {
        "/responses": {"post": {"body": reference("Item")}, "patch": {"body": reference("Unused")}},
        "/responses/{id}": {"get": {}, "put": {}},
        "/files": {"get": {"body": reference("Unused")}},
    },
    "components": {
        "schemas": {
            "Item": {
                "oneOf": [reference("Message"), reference("Computer"), kind("web_search"), {"type": "string"}],
                "discriminator": {"propertyName": "type", "mapping": {"web_search": "x"}},
            },
            "Message": kind("message"),
            "Computer": kind("computer_call"),
            "Unused": kind("unused"),
        }
    },
}


def shared(*, has_other_types: bool) -> dict[str, Any]:
    return shared_document(THEIRS, DOCUMENT, has_other_types=has_other_types)


def test_operations_and_components_that_the_gateway_has_no_use_for_are_left_out() -> None:
    document = shared(has_other_types=True)
    assert {path: list(each) for path, each in document["paths"].items()} == {
        "/responses": ["post"],
        "/responses/{id}": ["get"],
    }
    assert document["components"]["schemas"].keys() == {"Item", "Message", "Computer"}


def test_alternatives_of_types_that_the_gateway_does_not_know_are_left_out_if_asked_for() -> None:
    document = shared(has_other_types=False)
    item = document["components"]["schemas"]["Item"]
    assert item == {"oneOf": [reference("Message"), {"type": "string"}]}
    assert document["components"]["schemas"].keys() == {"Item", "Message"}
    assert len(shared(has_other_types=True)["components"]["schemas"]["Item"]["oneOf"]) == 4


def test_complements_are_left_out_and_the_document_is_not_changed() -> None:
    for has_other_types in (True, False):
        assert "not" not in str(shared(has_other_types=has_other_types)["components"])
    assert THEIRS["components"]["schemas"]["Message"] == kind("message")
