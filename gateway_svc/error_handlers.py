"""Handlers of errors that routes raise: each is answered in the shape of the API that was called.

Knows no route; a fault of the gateway itself is logged, and its answer says no more than that.
So is, now and then, why calls cannot be served: a wrong address shows in the log.
"""

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

import quire
from common.rare_warning import RareWarning
from gateway_svc.api_error import ApiError, from_quire, from_validation
from gateway_svc.error_answer import error_answer

METHODS = ("DELETE", "GET", "POST", "PUT")  # of all routes; and HEAD where GET is
_INTERNAL = "the gateway failed to answer: its log has the reason"

log = structlog.get_logger()


def add_error_handlers(app: FastAPI) -> None:
    """Answer the errors of all routes."""
    unserved = RareWarning("calls answered with 503")

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error_answer(request.scope, error)

    @app.exception_handler(quire.QuireError)
    async def failed(request: Request, error: quire.QuireError) -> Response:
        if isinstance(error, quire.UnavailableError):
            unserved.record(reason=error.message)
        return error_answer(request.scope, from_quire(error, {}))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_answer(request.scope, from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {request.method} {request.url.path}"
        code = "not_found" if error.status_code == 404 else None
        response = error_answer(request.scope, ApiError(error.status_code, message, code=code))
        if error.status_code == 405:
            response.headers["allow"] = ", ".join(_methods_of(app, request))
        return response

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        log.error("call failed", path=request.url.path, exc_info=error)
        return error_answer(request.scope, ApiError(500, _INTERNAL, kind="server_error", code="internal_error"))


def _methods_of(app: FastAPI, request: Request) -> list[str]:
    """Methods that some route has for the path, which several routes may share."""
    found = [
        method
        for method in METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in app.routes)
    ]
    return [*found, "HEAD"] if "GET" in found else found
