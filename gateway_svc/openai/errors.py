"""Errors in the shape of OpenAI's API."""

import math
from typing import Any

import orjson
from starlette.responses import Response

from gateway_svc.api_error import ApiError


def error_object(error: ApiError) -> dict[str, Any]:
    """The JSON object that says so."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def error_response(error: ApiError) -> Response:
    """The answer that says so."""
    wait_s = error.retry_after_s
    headers = {} if wait_s is None else {"retry-after": str(max(1, math.ceil(wait_s)))}
    return Response(orjson.dumps(error_object(error)), error.status, headers, media_type="application/json")
