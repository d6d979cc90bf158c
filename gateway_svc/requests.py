"""`/requests`: what runs and waits, and the record, pause, resumption and cancellation of one. Quire's own API."""

import dataclasses
from typing import Annotated, Any

from fastapi import APIRouter, Query

import quire
from gateway_svc.json_body import JsonRoute
from gateway_svc.request_fields import ApiModel
from quire.params import PauseKeep

_MAX_PAGE = 1000


class PauseRequest(ApiModel):
    """Body of a pause: what the request keeps meanwhile."""

    keep: PauseKeep = "auto"


def requests_router(client: quire.AsyncClient) -> APIRouter:
    """Routes that answer by calls to the client; its errors are the application's."""
    router = APIRouter(prefix="/requests", route_class=JsonRoute)

    @router.get("")
    async def list_requests(
        tenant: str | None = None,
        state: Annotated[list[quire.LiveState] | None, Query()] = None,
        page_size: Annotated[int, Query(ge=1, le=_MAX_PAGE)] = 100,
        page_token: str | None = None,
    ) -> dict[str, Any]:
        """Requests that have not ended, in the order of their arrival."""
        page = await client.list_requests(tenant=tenant, state=state, page_size=page_size, page_token=page_token)
        found = [{**dataclasses.asdict(each), "state": each.state.value} for each in page.requests]
        return {"data": found, "next_page_token": page.next_page_token}

    @router.get("/{request_id}")
    async def get_request(request_id: str) -> dict[str, Any]:
        """State, output and usage of a request, also for some time after its end."""
        record = await client.get(request_id)
        return {
            "request_id": record.request_id,
            "state": record.state.value,
            "waiting_for": record.waiting_for,
            "error": record.error or None,
            "created": int(record.created_unix_s),
            "tenant": record.tenant,
            "samples": [
                {"index": each.index, "text": each.text, "finish_reason": each.finish and each.finish.reason.value}
                for each in record.samples
            ],
            "usage": dataclasses.asdict(record.usage),
        }

    @router.post("/{request_id}/cancel")
    async def cancel(request_id: str) -> dict[str, str]:
        return {"state": (await client.cancel(request_id)).value}

    @router.post("/{request_id}/pause")
    async def pause(request_id: str, body: PauseRequest | None = None) -> dict[str, str]:
        """Stop computing; the output so far is kept. Paused requests give their memory to others."""
        return {"state": (await client.pause(request_id, (body or PauseRequest()).keep)).value}

    @router.post("/{request_id}/resume")
    async def resume(request_id: str) -> dict[str, str]:
        return {"state": (await client.resume(request_id)).value}

    return router
