"""Routes of the Responses API."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import Response

from gateway_svc.api_error import invalid
from gateway_svc.departure import answer_unless_departed
from gateway_svc.headers import IdempotencyKey, LastEventId
from gateway_svc.json_body import JsonRoute
from gateway_svc.openai.responses.compaction import CompactionRequest
from gateway_svc.openai.responses.fields import ResponseRequest
from gateway_svc.openai.responses.responses import Responses

EventNumber = Annotated[int | None, Query(ge=0, lt=1 << 53)]


class _ResponseId(StringConvertor):
    """Id of a response in a path, where the names of other calls are none."""

    regex = "(?!compact$|input_tokens$)[^/]+"


register_url_convertor("response", _ResponseId())


def responses_router(responses: Responses) -> APIRouter:
    """Routes that answer by these responses."""
    router = APIRouter(prefix="/v1/responses", route_class=JsonRoute)

    @router.post("", response_model=None)
    async def create_response(
        body: ResponseRequest,
        request: Request,
        idempotency_key: IdempotencyKey = None,
        last_event_id: LastEventId = None,
    ) -> Response:
        after = -1
        if last_event_id is not None:
            if idempotency_key is None or not body.stream:
                raise invalid("last-event-id", "give stream: true and the Idempotency-Key of the first request as well")
            after = _number(last_event_id)
        return await answer_unless_departed(request, responses.create(body, idempotency_key, after))

    @router.post("/input_tokens", response_model=None)
    async def count_input_tokens(body: ResponseRequest) -> Response:
        return await responses.count_input(body)

    @router.post("/compact", response_model=None)
    async def compact_conversation(body: CompactionRequest, request: Request) -> Response:
        return await answer_unless_departed(request, responses.compact(body))

    @router.get("/{response_id:response}", response_model=None)
    async def retrieve_response(
        response_id: str,
        stream: bool = False,
        starting_after: EventNumber = None,
        last_event_id: LastEventId = None,
    ) -> Response:
        if not stream:
            return await responses.retrieve(response_id)
        if starting_after is None and last_event_id is not None:
            starting_after = _number(last_event_id)
        return await responses.resume(response_id, -1 if starting_after is None else starting_after)

    @router.get("/{response_id}/input_items", response_model=None)
    async def list_input_items(
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: Annotated[str | None, Query(max_length=200)] = None,
    ) -> Response:
        return await responses.input_items(response_id, limit=limit, order=order, after=after)

    @router.post("/{response_id}/cancel", response_model=None)
    async def cancel_response(response_id: str) -> Response:
        return await responses.cancel(response_id)

    @router.delete("/{response_id:response}", response_model=None)
    async def delete_response(response_id: str) -> Response:
        return await responses.delete(response_id)

    return router


def _number(event_id: str) -> int:
    if not (event_id.isascii() and event_id.isdigit() and len(event_id) < 16):
        raise invalid("last-event-id", "give the id of an event of this stream")
    return int(event_id)
