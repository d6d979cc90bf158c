"""HEAD, answered as GET by the application; the server leaves out the body."""

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadAsGet:
    """Middleware that hands on HEAD as GET, so that each route of GET has it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self._app({**scope, "method": "GET"} if is_head else scope, receive, send)
