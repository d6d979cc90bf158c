"""`/prefixes`: prefixes of prompts that are computed once and kept. Quire's own API."""

import dataclasses
from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.responses import JSONResponse, Response

import quire
from gateway_svc.api_error import invalid, sdk_refusals
from gateway_svc.json_body import JsonRoute
from gateway_svc.openai.chat_messages import ChatMessage, chat_of
from gateway_svc.openai.tools import Tools, template_tools
from gateway_svc.request_fields import ApiModel, Items
from gateway_svc.served_model import ServedModel

# The scheduler checks it.
PinName = Annotated[str, Path(json_schema_extra={"pattern": "^[A-Za-z0-9._:-]{1,128}$"})]


class PinRequest(ApiModel):
    """A prefix as text, token ids or messages; exactly one of them."""

    prompt: str | Items[int] | None = None
    messages: Items[ChatMessage] | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tenant: str | None = None
    cache_salt: str | None = None

    async def prefix(self, model: ServedModel) -> Any:
        """The prefix for the SDK. Raises ApiError; if it is a conversation, the errors of asking for the model, too."""
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "give either this or messages")
        if self.messages is None:
            return self.prompt
        tools, format = template_tools(self.tools or ()), (await model.get()).answer_format
        return chat_of(self.messages, tools, self.chat_template_kwargs, format=format)


def prefixes_router(client: quire.AsyncClient, model: ServedModel) -> APIRouter:
    """Routes that answer by calls to the client; its errors are the application's."""
    router = APIRouter(prefix="/prefixes", route_class=JsonRoute)

    @router.get("")
    async def list_prefixes(tenant: str | None = None) -> dict[str, Any]:
        """The pinned prefixes of a tenant, by name."""
        return {"data": [dataclasses.asdict(each) for each in await client.list_prefixes(tenant=tenant)]}

    @router.put("/{name}", response_model=None)
    async def pin(name: PinName, body: PinRequest) -> Response:
        """201 for a new pin, 200 for the same one again, 409 if the name has another prefix."""
        prefix = await body.prefix(model)
        with sdk_refusals(dict.fromkeys(("prefix", "prompt"), "prompt" if body.messages is None else "messages")):
            pinned = await client.pin_prefix(name, prefix, tenant=body.tenant, cache_salt=body.cache_salt)
        return JSONResponse(dataclasses.asdict(pinned), status_code=201 if pinned.created else 200)

    @router.delete("/{name}", status_code=204, response_model=None)
    async def unpin(name: PinName, tenant: str | None = None) -> Response:
        await client.unpin_prefix(name, tenant=tenant)
        return Response(status_code=204)

    return router
