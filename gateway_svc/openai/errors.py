"""Errors in the shape of OpenAI's API."""

from typing import Any

import orjson
from starlette.responses import Response

from gateway_svc.api_error import ApiError

ID_HEADER = "x-request-id"


def error_object(error: ApiError) -> dict[str, Any]:
    """The JSON object that says so."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def error_response(error: ApiError) -> Response:
    """The answer that says so."""
    headers = error.headers | ({} if error.request_id is None else {ID_HEADER: error.request_id})
    return Response(orjson.dumps(error_object(error)), error.status, headers, media_type="application/json")
