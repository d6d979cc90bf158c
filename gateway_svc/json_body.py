"""JSON of a request's body, read strictly: what UTF-8, a number of 64 bits or a call stack cannot hold is refused here.

A lone surrogate, NaN, an infinite number and deep nesting are no valid body, so nothing behind this file meets them. A
whole number beyond 64 bits becomes a number that is not whole. Knows no field.
"""

import json
from collections.abc import Callable, Coroutine
from itertools import islice
from typing import Any

import orjson
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from common.bounds import MOST_MESSAGES
from gateway_svc.api_error import ApiError

MAX_DEPTH = 100  # of objects and lists within each other: copies and dumps of a value call themselves as deeply
MAX_CONTAINERS = 2 * MOST_MESSAGES  # objects and lists: each is looked at for microseconds, while no stream goes on


class JsonRequest(Request):
    """A request whose body is read strictly."""

    async def json(self) -> Any:
        """The value of the body. Raises json.JSONDecodeError."""
        return decode_json(await self.body())

    async def has_body(self) -> bool:
        """True if the body is not empty, which only reading tells where no length is declared."""
        if "transfer-encoding" not in self.headers:
            return self.headers.get("content-length", "0") != "0"
        try:
            return bool(await self.body())
        except ClientDisconnect:
            return False  # whoever reads it next is told


class JsonRoute(APIRoute):
    """A route whose body is read strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Handler of a request of the route."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            read = JsonRequest(request.scope, request.receive)
            if self.body_field is not None and await read.has_body():
                check_body_type(request.headers)
            return await handle(read)

        return handle_strictly


def check_body_type(headers: Headers) -> None:
    """Raise ApiError for a body that is sent as something else than JSON, or compressed."""
    kind = headers.get("content-type", "")
    main, _, sub = kind.partition(";")[0].strip().lower().partition("/")
    if main != "application" or not (sub == "json" or sub.endswith("+json")):
        named = f"has the content-type {kind:.80}" if kind else "has no content-type"
        raise _unsupported("content-type", f"the body {named}: send JSON with 'content-type: application/json'")
    coding = headers.get("content-encoding", "").strip()
    if coding.lower() not in ("", "identity"):
        raise _unsupported("content-encoding", f"the body is encoded with {coding:.80}: send it as it is")


def _unsupported(header: str, message: str) -> ApiError:
    return ApiError(415, message, param=header, code="unsupported_media_type")


def decode_json(data: bytes) -> Any:
    """The value of a JSON text. Raises json.JSONDecodeError."""
    value = orjson.loads(data)
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and (fault := _fault(value)):
        raise json.JSONDecodeError(fault, "", 0)
    return value


def _fault(value: Any) -> str | None:
    """Fault of a value with too many objects and lists, within each other or in all; else None."""
    level = [value] if isinstance(value, (dict, list)) else []
    num_left = MAX_CONTAINERS - len(level)
    for _ in range(MAX_DEPTH):
        inner = (item for each in level for item in _items(each) if isinstance(item, (dict, list)))
        level = list(islice(inner, num_left + 1))
        num_left -= len(level)
        if num_left < 0:
            return f"more than {MAX_CONTAINERS} objects and lists"
        if not level:
            return None
    return f"more than {MAX_DEPTH} objects and lists within each other"


def _items(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
