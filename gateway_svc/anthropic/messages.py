"""`/v1/messages` and `/v1/messages/count_tokens`."""

from starlette.responses import Response

import quire
from gateway_svc.answering import answer
from gateway_svc.anthropic.fields import NAMES, Conversation, MessageRequest
from gateway_svc.anthropic.message_call import MessageCall
from gateway_svc.api_error import TOO_LONG, ApiError, sdk_refusals
from gateway_svc.call_grammars import CallGrammars
from gateway_svc.generation import Generation
from gateway_svc.grammar_faults import GrammarFaults
from gateway_svc.request_fields import new_request_id
from gateway_svc.served_model import ServedModel
from gateway_svc.vocabulary import Vocabulary


class Messages:
    """Answers requests for messages."""

    def __init__(self, client: quire.AsyncClient, model: ServedModel, vocabulary: Vocabulary) -> None:
        self._client = client
        self._model = model
        self._call_grammars = CallGrammars(client, vocabulary)

    async def answer(self, body: MessageRequest, idempotency_key: str | None) -> Response:
        """The answer to a request. Raises ApiError."""
        name = await self._model.check(body.model)
        of_model = (await self._model.get()).answer_format
        chat, format = body.chat(of_model), body.tool_use.format(of_model)
        request_id = new_request_id(self._client, "msg_", chat, idempotency_key, body)
        call = MessageCall(body, name, request_id)
        with sdk_refusals(call.names):
            keywords = body.keywords(call.request_id)
            if not format.is_plain:
                keywords["keep_special_tokens"] = True  # markers may be such
            format = await self._call_grammars.constrain(keywords, format, chat, body.tool_use)
            call.faults = GrammarFaults(keywords, body.tool_use)
            stream = self._client.stream_chat(
                chat.messages,
                continue_final_message=chat.continue_final_message,
                tools=chat.tools,
                template_kwargs=chat.template_kwargs,
                **keywords,
            )
        call.read(format)
        generation = Generation([stream], 1, detaches=body.detaches(idempotency_key))
        try:
            return await answer(generation, call, streamed=bool(body.stream))
        except ApiError as error:
            if error.code == TOO_LONG and error.param == "max_tokens":
                error.message = f"{await self._excess(chat, body.max_tokens)}{error.message}"
            raise

    async def _excess(self, chat: quire.Chat, max_tokens: int) -> str:
        """Anthropic's words for a context that is exceeded, whose numbers Claude Code reads to ask for fewer tokens.

        They begin the refusal. Empty where not the context is too short, but the memory.
        """
        model = await self._model.get()
        with sdk_refusals(NAMES):
            num_prompt_tokens = len((await self._client.tokenize(chat)).token_ids)
        if num_prompt_tokens + max_tokens <= model.max_model_len:
            return ""
        numbers = f"{num_prompt_tokens} + {max_tokens} > {model.max_model_len}"
        return f"input length and `max_tokens` exceed context limit: {numbers}: "

    async def count_tokens(self, body: Conversation) -> dict[str, int]:
        """The number of tokens that a request with this input would have. Raises ApiError, QuireError."""
        await self._model.check(body.model)
        chat = body.chat((await self._model.get()).answer_format)
        with sdk_refusals(NAMES):
            tokens = await self._client.tokenize(chat)
        return {"input_tokens": len(tokens.token_ids)}
