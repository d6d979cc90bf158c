"""The gateway's OpenAPI document, and the comparison of answers with it. Starts nothing."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
from jsonschema import Draft202012Validator

import quire
from gateway_svc.app import create_app
from gateway_svc.openapi.document import describe

APP = create_app(quire.AsyncClient("127.0.0.1:1"), max_body_bytes=1 << 20)
DOCUMENT = describe(APP.routes)
OPERATIONS = [(method, path) for path, operations in DOCUMENT["paths"].items() for method in operations]


def schema(part: dict[str, Any]) -> dict[str, Any]:
    """A schema of the document that can stand alone."""
    return {**part, "components": DOCUMENT["components"]}


def events(answer: httpx2.Response) -> Iterator[Any]:
    """Data of the events of a streamed answer."""
    for line in answer.text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def check_described(method: str, path: str, answer: httpx2.Response) -> None:
    """Fails for a status, a content type, a header or a body that the document does not have."""
    responses = DOCUMENT["paths"][path][method]["responses"]
    assert str(answer.status_code) in responses, f"{method} {path}: {answer.status_code} {answer.text[:200]}"
    described = responses[str(answer.status_code)]
    for name, header in described.get("headers", {}).items():
        assert name in answer.headers or not header.get("required"), f"{method} {path} has no {name}"
    if "content" not in described:
        assert not answer.content, answer.text
        return
    kind = answer.headers["content-type"].partition(";")[0]
    found = described["content"][kind]["schema"]
    if kind == "text/event-stream":
        for event in events(answer):
            data = found["properties"]["data"]["anyOf"][1]["contentSchema"]
            Draft202012Validator(schema(data)).validate(event)
    elif kind == "application/json":
        Draft202012Validator(schema(found)).validate(answer.json())
