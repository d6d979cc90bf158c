"""References to items of stored responses, resolved to the items themselves.

The id of an item has the id of its response in it, so nothing else is kept for them.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pydantic import TypeAdapter

import quire
from common.bounds import MOST_TEXT_BYTES
from gateway_svc.api_error import ApiError, invalid
from gateway_svc.openai.responses.annotation import ID_PREFIX
from gateway_svc.openai.responses.items import GivenItem, InputItem, ItemReference
from gateway_svc.openai.responses.output import Output
from gateway_svc.openai.responses.stored_responses import MAX_EARLIER_RESPONSES, StoredResponse, StoredResponses
from gateway_svc.vocabulary import Vocabulary

_ITEM_ID = re.compile(r"(?:msg|rs|fc)_(.+?)(?:-in-\d+|_\d+)?")
_MOST_READ_BYTES = 4 * MOST_TEXT_BYTES  # of responses, for one request
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
        wanted = _by_response(each.id for each in given if isinstance(each, ItemReference))
        found = await self._find(wanted, tenant)
        return [_named(each, found) if isinstance(each, ItemReference) else each for each in given]

    async def _find(self, wanted: Mapping[str, Counter[str]], tenant: str | None) -> dict[str, InputItem]:
        """The items that are referred to, by their ids. Of each response no others are kept."""
        found: dict[str, InputItem] = {}
        num_read = num_chars = 0
        for response_id, counts in wanted.items():
            response = await self._response(response_id, tenant)
            num_read += 0 if response is None else _size(response.record)
            if num_read > _MOST_READ_BYTES:
                raise invalid("input", f"refers to items of responses of more than {_MOST_READ_BYTES:,} bytes")
            items = {} if response is None else self._items(response)
            for item_id, count in counts.items():
                item = items.get(item_id)
                if item is None:
                    raise _unknown(item_id)
                num_chars += count * len(item.model_dump_json())
                if num_chars > MOST_TEXT_BYTES:
                    raise invalid("input", f"refers to items of more than {MOST_TEXT_BYTES:,} characters")
                found[item_id] = item
        return found

    async def _response(self, response_id: str, tenant: str | None) -> StoredResponse | None:
        """A response that has ended; None if it is unknown, or of another tenant."""
        response = await self._stored.find(response_id)
        if response is None or not response.is_of(tenant):
            return None
        if not response.record.state.is_terminal:
            raise invalid("input", f"refers to an item of {response_id}, which has not ended yet")
        return response

    def _items(self, response: StoredResponse) -> dict[str, InputItem]:
        """Items of a response, by their ids."""
        return response.input | self._output(response)

    def _output(self, response: StoredResponse) -> dict[str, InputItem]:
        record = response.record
        output = Output(record.request_id, response.annotation, self._vocabulary, in_reasoning=record.in_reasoning)
        output.add_text(record.text, len(record.token_ids))
        output.end()
        return {each.id: _ITEM.validate_python(each.made("completed")) for each in output.items}


def _by_response(item_ids: Iterable[str]) -> dict[str, Counter[str]]:
    """Counts of the references to each item, by the id of its response. Raises ApiError for too many responses."""
    wanted: dict[str, Counter[str]] = {}
    for item_id in item_ids:
        found = _ITEM_ID.fullmatch(item_id)
        wanted.setdefault(ID_PREFIX + found[1] if found else "", Counter())[item_id] += 1
        if len(wanted) > MAX_EARLIER_RESPONSES:
            raise invalid("input", f"refers to items of more than {MAX_EARLIER_RESPONSES} responses")
    return wanted


def _named(reference: ItemReference, found: Mapping[str, InputItem]) -> InputItem:
    return found[reference.id].model_copy(update={"id": reference.id})


def _size(record: quire.RequestRecord) -> int:
    """Bytes of what a response is read from, about."""
    return len(record.annotation) + len(record.text)


def _unknown(item_id: str) -> ApiError:
    message = f"Item with id '{item_id:.130}' not found. Items are kept with stored responses alone."
    return ApiError(404, message, param="input", code="not_found")
