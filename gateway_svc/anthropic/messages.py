"""`/v1/messages` and `/v1/messages/count_tokens`."""

from starlette.responses import Response

import quire
from gateway_svc.answering import answer
from gateway_svc.anthropic.fields import NAMES, Conversation, MessageRequest
from gateway_svc.anthropic.message_call import MessageCall
from gateway_svc.api_error import sdk_refusals
from gateway_svc.generation import Generation, new_request_id
from gateway_svc.served_model import ServedModel


class Messages:
    """Answers requests for messages."""

    def __init__(self, client: quire.AsyncClient, model: ServedModel) -> None:
        self._client = client
        self._model = model

    async def answer(self, body: MessageRequest, idempotency_key: str | None) -> Response:
        """The answer to a request. Raises ApiError."""
        name = await self._model.check(body.model)
        call = MessageCall(body, name, new_request_id("msg_", idempotency_key, body.tenant))
        with sdk_refusals(call.names):
            stream = self._client.stream_chat(
                body.turns, continue_final_message=body.is_prefilled, **body.keywords(call.request_id)
            )
        generation = Generation([stream], 1, detaches=idempotency_key is not None)
        return await answer(generation, call, streamed=bool(body.stream))

    async def count_tokens(self, body: Conversation) -> dict[str, int]:
        """The number of tokens that a request with this input would have. Raises ApiError, QuireError."""
        await self._model.check(body.model)
        with sdk_refusals(NAMES):
            tokens = await self._client.tokenize(body.turns, continue_final_message=body.is_prefilled)
        return {"input_tokens": len(tokens.token_ids)}
