"""The check of API keys on HTTP: as `Authorization: Bearer`, OpenAI's form, or as `x-api-key`, Anthropic's."""

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway_svc.api_error import ApiError
from quire.api_keys import AcceptedKeys

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/metrics"})  # for probes and scrapes, which have no key
_MESSAGE = "Incorrect or missing API key: send one that this server knows, as 'Authorization: Bearer KEY'"


class KeyCheck:
    """Middleware that answers 401 to a call without one of the keys that are accepted at that moment."""

    def __init__(
        self, app: ASGIApp, *, keys: Callable[[], AcceptedKeys], respond: Callable[[Scope, ApiError], Response]
    ) -> None:
        self._app = app
        self._keys = keys
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        response = self._respond(scope, ApiError(401, _MESSAGE, code="invalid_api_key"))
        response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        keys = self._keys()
        for name, value in scope["headers"]:
            if name == b"authorization" and keys.accept_header(value):
                return True
            if name == b"x-api-key" and keys.accept(value.strip()):
                return True
        return False
