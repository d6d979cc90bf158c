"""`/tokenize` and `/detokenize`, with vLLM's fields."""

from typing import Any

from pydantic import Field

import quire
from gateway_svc.api_error import invalid, sdk_refusals
from gateway_svc.openai.chat_messages import ChatMessage, chat_of
from gateway_svc.openai.tools import Tools, template_tools
from gateway_svc.request_fields import ApiModel, Items
from gateway_svc.served_model import ServedModel

_NAMES = {"token_ids": "tokens", "text": "prompt", "template_kwargs": "chat_template_kwargs"}  # by the SDK's


class TokenizeRequest(ApiModel):
    """A text or a conversation; exactly one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[ChatMessage] | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = Field(None, description="Default: unless continue_final_message is true.")
    continue_final_message: bool | None = Field(None, description="End behind the last message's content.")
    return_token_strs: bool | None = Field(None, description="Answer with token_strs, too.")


class DetokenizeRequest(ApiModel):
    """Token ids."""

    model: str | None = None
    tokens: Items[int]


class Tokens:
    """Answers both."""

    def __init__(self, client: quire.AsyncClient, model: ServedModel) -> None:
        self._client = client
        self._model = model

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """Token ids, as a prompt with this text would have them. Raises ApiError, QuireError."""
        await self._model.check(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give either this or messages")
        text: Any = body.prompt
        if body.messages is not None:
            text = chat_of(
                body.messages,
                template_tools(body.tools or ()),
                body.chat_template_kwargs,
                format=(await self._model.get()).answer_format,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=bool(body.continue_final_message),
            )
        with sdk_refusals(_NAMES):
            found = await self._client.tokenize(text, add_special_tokens=body.add_special_tokens)
        model = await self._model.get()
        strings = list(found.tokens) if body.return_token_strs else None
        ids = list(found.token_ids)
        return {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": strings}

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, Any]:
        """The text of token ids, special tokens included. Raises ApiError, QuireError."""
        await self._model.check(body.model)
        with sdk_refusals(_NAMES):
            return {"prompt": await self._client.detokenize(body.tokens, keep_special_tokens=True)}
