"""Hooks of schemathesis: three of four valid cases are fitted to what the gateway serves, and outputs are kept short.

A schema cannot name the served model, its vocabulary or a live request, and another server's document has what this one
does not offer, so nearly all bodies made of it alone would be refused. The fourth case is sent as it was made. Loaded
by schemathesis, in its own process, with the gateway's address in QUIRE_GATEWAY_URL.
"""

import os
from collections import deque
from typing import Any
from zlib import crc32

import httpx2
import schemathesis

from tests.openapi.fitting import Fitting
from tests.openapi.meaning import MODEL, make_sense, shorten

_VERSION = "/v1"  # which the paths of OpenAI's document lack
_LIVE = ("/requests/{request_id}/pause", "/requests/{request_id}/resume")  # only live requests have these
_LONG = {"model": MODEL, "input": "Once", "background": True, "max_output_tokens": 1500, "timeout_s": 2}
_SHORT = {"model": MODEL, "input": "Once", "max_output_tokens": 1}

_gateway = httpx2.Client(base_url=os.environ["QUIRE_GATEWAY_URL"])
_fitting = Fitting(_gateway.get("/openapi.json").raise_for_status().json())
_ids: deque[str] = deque(maxlen=8)  # of the last requests
_stored: deque[str] = deque(maxlen=8)  # of the last responses that can be retrieved


def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Change a case before it is sent."""
    path = case.operation.path if _fitting.has(case.operation.path) else _VERSION + case.operation.path
    is_valid = case.meta is not None and case.meta.generation.mode.name == "POSITIVE"
    is_fitted = is_valid and _draw(case, 4) > 0
    if isinstance(case.body, dict):
        shorten(case.body, path)
    if not is_fitted:
        return
    _name(case, path)
    if isinstance(case.body, dict):
        case.body = make_sense(_fitting.body(case.method, path, case.body), path, _draw(case, 1 << 30))
        if case.headers and _draw(case, 3):
            for name in ("last-event-id", "idempotency-key"):  # of one body alone
                case.headers.pop(name, None)


def after_call(context: Any, case: Any, response: Any) -> None:
    """Remember the ids of the last requests, for calls that name one."""
    given = [value for name in ("x-request-id", "request-id") for value in response.headers.get(name, ())]
    if response.status_code != 200 or not given:
        return
    _ids.append(given[0])
    is_creation = case.method == "POST" and case.operation.path.endswith("/responses")
    if is_creation and case.body.get("store") is not False:
        _stored.append(given[0])


def _name(case: Any, path: str) -> None:
    """Name what the gateway knows in the path."""
    for parameter in case.path_parameters or ():
        if path in _LIVE:
            case.path_parameters[parameter] = _live_request(is_paused=path.endswith("resume"))
        elif path.startswith("/requests/") and _ids:
            case.path_parameters[parameter] = _ids[_draw(case, len(_ids))]
        elif path.startswith("/v1/responses/"):
            is_kept = _stored and case.method != "DELETE"
            case.path_parameters[parameter] = _stored[-1] if is_kept else _new_response(_SHORT)
        elif path.startswith("/v1/models/"):
            case.path_parameters[parameter] = MODEL


def _live_request(*, is_paused: bool) -> str:
    """Id of a new request that goes on for a while."""
    request_id = _new_response(_LONG)
    if is_paused:
        _gateway.post(f"/requests/{request_id}/pause", json={})
    return request_id


def _new_response(body: dict[str, Any]) -> str:
    """Id of a new response that is stored."""
    return str(_gateway.post("/v1/responses", json=body).raise_for_status().json()["id"])


def _draw(case: Any, sides: int) -> int:
    """A number below `sides`, the same for the same case."""
    return crc32(repr((case.path_parameters, case.query, case.headers, case.body)).encode()) % sides


schemathesis.hook(before_call)
schemathesis.hook(after_call)
