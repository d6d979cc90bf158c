"""The OpenAPI document: paths, parameters and bodies as the application reads them, answers from the table of them.

Fields of bodies come from the models that read them, so a new one is described by itself; `bounds` adds what the
scheduler enforces. Makes no answer.
"""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from starlette.routing import BaseRoute

from gateway_svc.openapi.answers import ANSWERS, STATUSES, Answers
from gateway_svc.openapi.bounds import add_bounds
from gateway_svc.openapi.error_objects import Error, MessageError

_VERSION = "3.1.0"
_REFS = "#/components/schemas/{model}"
_ABOUT = (
    "Large language models behind the APIs of OpenAI and Anthropic, and Quire's own paths for requests and prefixes."
)
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_OWN = {"summary": "Description", "operationId": "description"}
_ID = {"description": "Id of the request.", "required": True, "schema": {"type": "string"}}
_RETRY = {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}
_WITH_RETRY = (429, 503, 529)
_FINAL = {"description": "The same call would fail again: clients do not repeat it.", "schema": {"const": "false"}}
_MAYBE_FINAL = (409, 500, 504)


def describe(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """The document of these routes. Raises KeyError for an operation that the table of answers lacks."""
    document = get_openapi(
        title="Quire", version=version("quire-llm"), openapi_version=_VERSION, description=_ABOUT, routes=routes
    )
    components: dict[str, Any] = document["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):  # of FastAPI's own answer to a wrong body
        components.pop(unused, None)
    add_bounds(components)
    objects = _Objects(components)
    document["paths"]["/openapi.json"] = {"get": dict(_OWN)}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answers = ANSWERS[method, path]
            operation["responses"] = _responses(answers, objects)
            operation["security"] = [] if answers.is_open else [{}, *({name: []} for name in _KEYS)]
    document["components"]["securitySchemes"] = _KEYS
    return document


class _Objects:
    """Schemas of all types of answers, made together, so that each named one is a component once."""

    def __init__(self, components: dict[str, Any]) -> None:
        """Add the components to these."""
        kinds = [kind for each in ANSWERS.values() for kind in (each.ok, each.events) if kind is not None]
        kinds += [Error, MessageError, Error | MessageError]
        self._kinds = [kind for number, kind in enumerate(kinds) if kind not in kinds[:number]]
        inputs: list[Any] = [(number, "serialization", TypeAdapter(kind)) for number, kind in enumerate(self._kinds)]
        self._schemas, named = TypeAdapter.json_schemas(inputs, ref_template=_REFS)
        for name, schema in named["$defs"].items():
            assert components.setdefault(name, schema) == schema, f"two components are named {name}"

    def schema(self, kind: Any) -> dict[str, Any]:
        """The schema of a type, which refers to components."""
        return self._schemas[self._kinds.index(kind), "serialization"]


def _responses(answers: Answers, objects: _Objects) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for status in (answers.status, *answers.also):
        made[str(status)] = _success(answers, objects)
    for status in answers.bare:
        made[str(status)] = {"description": STATUSES[status]}
    for status in answers.statuses:
        made[str(status)] = _error(answers, status, objects)
    return made


def _success(answers: Answers, objects: _Objects) -> dict[str, Any]:
    described: dict[str, Any] = {"description": answers.about}
    if answers.ok is not None:
        described["content"] = {answers.media_type: {"schema": objects.schema(answers.ok)}}
    if answers.events is not None:
        described["content"]["text/event-stream"] = {
            "schema": _event(objects.schema(answers.events), objects.schema(Error))
        }
    if answers.id_header is not None:
        described["headers"] = {answers.id_header: _ID}
    if answers.links:
        described["links"] = {
            operation: {"operationId": operation, "parameters": {parameter: value}}
            for operation, (parameter, value) in answers.links.items()
        }
    return described


def _event(data: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    """Schema of each event of a stream, of which JSON is the data; that of OpenAI's API ends with [DONE]."""
    as_json = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [data, error]},
    }
    return {
        "type": "object",
        "description": "One of the server-sent events with which a request for a stream is answered.",
        "properties": {
            "data": {"anyOf": [{"const": "[DONE]"}, as_json]},
            "event": {"type": "string", "description": "Its type, where the API names events."},
            "id": {"type": "string", "description": "For Last-Event-ID, where the stream can be resumed."},
        },
        "required": ["data"],
    }


def _error(answers: Answers, status: int, objects: _Objects) -> dict[str, Any]:
    kind: Any = MessageError if answers.is_anthropics else Error
    if answers.is_of_both:
        kind = Error | MessageError
    described: dict[str, Any] = {
        "description": STATUSES[status],
        "content": {"application/json": {"schema": objects.schema(kind)}},
    }
    headers: dict[str, Any] = {}
    if status in _WITH_RETRY:
        headers["retry-after"] = _RETRY
    if status in _MAYBE_FINAL:
        headers["x-should-retry"] = _FINAL
    if status == 401:
        headers["www-authenticate"] = {"required": True, "schema": {"const": "Bearer"}}
    if answers.is_anthropics:
        headers["request-id"] = _ID
    return described | ({"headers": headers} if headers else {})
