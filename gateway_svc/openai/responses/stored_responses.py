"""Stored responses, which are the records of their requests, and the conversations that they continue."""

import re
from dataclasses import dataclass

import quire
from common.bounds import MOST_TEXT_BYTES
from gateway_svc.api_error import ApiError, invalid
from gateway_svc.openai.responses.annotation import ID_PREFIX, Annotation, decode_annotation
from gateway_svc.openai.responses.items import InputItem
from gateway_svc.openai.responses.response_object import ResponseHead
from gateway_svc.openai.responses.turns import turns_of
from quire.parsing.answer_parser import AnswerParser
from quire.parsing.deltas import parsed_answer

MAX_EARLIER_RESPONSES = 256  # of one conversation
_ID = re.compile(rf"{ID_PREFIX}[A-Za-z0-9._:-]{{1,120}}")


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as its record has it now."""

    annotation: Annotation
    record: quire.RequestRecord

    @property
    def head(self) -> ResponseHead:
        return ResponseHead(self.record.request_id, self.annotation, self.record.created_unix_s)

    def is_of(self, tenant: str | None) -> bool:
        """True if it is this tenant's."""
        return self.record.tenant == (tenant or "")

    @property
    def input(self) -> dict[str, InputItem]:
        """Items of its own input by their ids, in order; one without an id, or with that of another, gets one."""
        items: dict[str, InputItem] = {}
        stem = self.head.stem
        for place, each in enumerate(self.annotation.input):
            item_id = each.id or ""
            items[item_id if item_id and item_id not in items else f"msg_{stem}-in-{place}"] = each
        return items

    @property
    def answer(self) -> quire.ChatMessage:
        """Output of the response, which must have ended, as a turn of the conversation."""
        record, annotation = self.record, self.annotation
        parser = AnswerParser(annotation.answer_format, record.request_id, in_reasoning=record.in_reasoning)
        parsed = parsed_answer([*parser.push(record.text), *parser.end()])
        calls = parsed.tool_calls[: annotation.max_calls]
        return quire.ChatMessage("assistant", parsed.content, tool_calls=calls, reasoning=parsed.reasoning)


class StoredResponses:
    """Reads the records that are responses."""

    def __init__(self, client: quire.AsyncClient) -> None:
        self._client = client

    async def get(self, response_id: str) -> StoredResponse:
        """The response as it is now. Raises ApiError if it is unknown or not stored, QuireError."""
        found = await self.find(response_id)
        if found is None:
            raise ApiError(404, f"Response with id '{response_id:.130}' not found.", code="not_found")
        return found

    async def conversation(self, response_id: str, tenant: str | None) -> list[quire.ChatMessage]:
        """Turns up to and with the output of a tenant's response that has ended, from the first of its conversation on.

        Raises ApiError if a part of it is another tenant's or not kept any more, or if it is too long; QuireError.
        """
        turns: list[quire.ChatMessage] = []  # the last first
        num_chars, wanted = 0, response_id
        for _ in range(MAX_EARLIER_RESPONSES):
            found = await self._earlier(wanted, tenant)
            own = [*turns_of(found.annotation.input), found.answer]
            num_chars += sum(map(_num_chars, own))
            if num_chars > MOST_TEXT_BYTES:
                raise invalid("previous_response_id", f"its conversation has more than {MOST_TEXT_BYTES:,} characters")
            turns += reversed(own)
            if found.annotation.previous_response_id is None:
                return turns[::-1]
            wanted = found.annotation.previous_response_id
        raise invalid("previous_response_id", f"its conversation has more than {MAX_EARLIER_RESPONSES} responses")

    async def _earlier(self, response_id: str, tenant: str | None) -> StoredResponse:
        found = await self.find(response_id)
        if found is None or not found.is_of(tenant):
            message = f"Previous response with id '{response_id:.130}' not found."
            raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
        if not found.record.state.is_terminal:
            raise invalid("previous_response_id", "the response has not ended yet")
        return found

    async def find(self, response_id: str) -> StoredResponse | None:
        """The response as it is now; None if it is unknown or not stored. Raises QuireError."""
        if _ID.fullmatch(response_id) is None:
            return None
        try:
            record = await self._client.get(response_id)
        except quire.NotFoundError:
            return None
        annotation = decode_annotation(record.annotation)
        return StoredResponse(annotation, record) if annotation is not None and annotation.store else None


def _num_chars(turn: quire.ChatMessage) -> int:
    return len(turn.content) + len(turn.reasoning) + sum(len(call.arguments) for call in turn.tool_calls)
