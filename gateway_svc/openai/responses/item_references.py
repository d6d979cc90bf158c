"""References to items of stored responses, resolved to the items themselves.

The id of an item has the id of its response in it, so nothing else is kept for them.
"""

import re
from collections.abc import Sequence

from pydantic import TypeAdapter

from common.bounds import MOST_TEXT_BYTES
from gateway_svc.api_error import ApiError, invalid
from gateway_svc.openai.responses.annotation import ID_PREFIX
from gateway_svc.openai.responses.items import GivenItem, InputItem, ItemReference
from gateway_svc.openai.responses.output import Output
from gateway_svc.openai.responses.stored_responses import MAX_EARLIER_RESPONSES, StoredResponse, StoredResponses
from gateway_svc.vocabulary import Vocabulary

_ITEM_ID = re.compile(r"(?:msg|rs|fc)_(.+?)(?:-in-\d+|_\d+)?")
_ITEM: TypeAdapter[InputItem] = TypeAdapter(InputItem)


class ItemReferences:
    """Finds the items that references name."""

    def __init__(self, stored: StoredResponses, vocabulary: Vocabulary) -> None:
        self._stored = stored
        self._vocabulary = vocabulary

    async def resolve(self, given: Sequence[GivenItem], tenant: str | None) -> list[InputItem]:
        """The items with those of the tenant's stored responses in place of references.

        Raises ApiError for an item that is unknown, whose response has not ended, or if they are too many; QuireError.
        """
        items: list[InputItem] = []
        of_response: dict[str, dict[str, InputItem]] = {}
        num_chars = 0
        for each in given:
            if isinstance(each, ItemReference):
                found = _ITEM_ID.fullmatch(each.id)
                response_id = ID_PREFIX + found[1] if found else ""
                if response_id not in of_response:
                    if len(of_response) == MAX_EARLIER_RESPONSES:
                        raise invalid("input", f"refers to items of more than {MAX_EARLIER_RESPONSES} responses")
                    of_response[response_id] = await self._items(response_id, tenant)
                item = of_response[response_id].get(each.id)
                if item is None:
                    raise _unknown(each.id)
                num_chars += len(item.model_dump_json())
                if num_chars > MOST_TEXT_BYTES:
                    raise invalid("input", f"refers to items of more than {MOST_TEXT_BYTES:,} characters")
                items.append(item.model_copy(update={"id": each.id}))
            else:
                items.append(each)
        return items

    async def _items(self, response_id: str, tenant: str | None) -> dict[str, InputItem]:
        """Items of a response by their ids; none of one that is unknown, or of another tenant."""
        response = await self._stored.find(response_id)
        if response is None or response.record.tenant != (tenant or ""):
            return {}
        if not response.record.state.is_terminal:
            raise invalid("input", f"refers to an item of {response_id}, which has not ended yet")
        stem = response.head.stem
        own = {each.id or f"msg_{stem}-in-{place}": each for place, each in enumerate(response.annotation.input)}
        return own | self._output(response)

    def _output(self, response: StoredResponse) -> dict[str, InputItem]:
        record = response.record
        output = Output(record.request_id, response.annotation, self._vocabulary, in_reasoning=record.in_reasoning)
        output.add_text(record.text, len(record.token_ids))
        output.end()
        return {each.id: _ITEM.validate_python(each.made("completed")) for each in output.items}


def _unknown(item_id: str) -> ApiError:
    message = f"Item with id '{item_id:.130}' not found. Items are kept with stored responses alone."
    return ApiError(404, message, param="input", code="not_found")
