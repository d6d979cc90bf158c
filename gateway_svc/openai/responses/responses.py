"""`/v1/responses`: responses are created here, and retrieved, resumed, cancelled and deleted by any gateway.

Keeps nothing: a response is its request, which the scheduler keeps.
"""

from collections.abc import AsyncGenerator
from typing import Any

import orjson
from starlette.responses import Response

import quire
from gateway_svc.api_error import from_quire, invalid, sdk_refusals
from gateway_svc.call_grammars import CallGrammars
from gateway_svc.event_stream import DONE, EventStream, Steps, next_turn
from gateway_svc.generation import Generation
from gateway_svc.grammar_faults import GrammarFaults
from gateway_svc.openai.chat_messages import templated
from gateway_svc.openai.errors import ID_HEADER
from gateway_svc.openai.responses.annotation import ID_PREFIX
from gateway_svc.openai.responses.compaction import CompactionRequest, Compactions
from gateway_svc.openai.responses.events import ResponseEvents
from gateway_svc.openai.responses.fields import ResponseRequest
from gateway_svc.openai.responses.item_references import ItemReferences
from gateway_svc.openai.responses.items import InputItem, items_of
from gateway_svc.openai.responses.output import Output
from gateway_svc.openai.responses.response_object import ResponseHead, Snapshot
from gateway_svc.openai.responses.stored_responses import StoredResponse, StoredResponses
from gateway_svc.openai.responses.truncation import ANSWER_PART, last_turns_that_fit
from gateway_svc.openai.responses.turns import turns_of
from gateway_svc.request_fields import new_request_id
from gateway_svc.resumption import not_resumable
from gateway_svc.served_model import ServedModel
from gateway_svc.single_tokens import MOST_AT_ONCE, single_tokens
from gateway_svc.vocabulary import Vocabulary, ids_of


class Responses:
    """Answers requests for responses. Calls raise ApiError, and QuireError where the scheduler cannot be asked."""

    def __init__(self, client: quire.AsyncClient, model: ServedModel, vocabulary: Vocabulary) -> None:
        self._client = client
        self._model = model
        self._vocabulary = vocabulary
        self._stored = StoredResponses(client)
        self._references = ItemReferences(self._stored, vocabulary)
        self._compactions = Compactions(client, model, self._stored, self._references)
        self._call_grammars = CallGrammars(client, vocabulary)

    async def create(self, body: ResponseRequest, idempotency_key: str | None, after: int = -1) -> Response:
        """The answer to a request: the response, its beginning if it runs in the background, or its events.

        `after` is the number of the last event that a client has, which sends its request again with the same key.
        """
        body.check()
        await self._model.check(body.model)
        model = await self._model.get()
        format = body.tool_use.format(model.answer_format)
        items = await self._references.resolve(items_of(body.input or []), body.tenant)
        chat = body.chat(await self._turns(body, items))
        request_id = new_request_id(self._client, ID_PREFIX, chat, idempotency_key, body)
        keywords = body.keywords(request_id)
        with sdk_refusals(body.names):
            format = await self._call_grammars.constrain(keywords, format, chat, body.tool_use)
        annotation = body.annotation(model, format, keywords, items)
        keywords["annotation"] = annotation.encode()
        if not format.is_plain:
            keywords["keep_special_tokens"] = True  # markers may be such
        with sdk_refusals(body.names):
            stream = self._client.stream_chat(
                chat.messages, tools=chat.tools, template_kwargs=chat.template_kwargs, **keywords
            )
        # Who streams a stored response may come back for it; who waits for a whole one does not know its id.
        may_return = annotation.background or (annotation.store and bool(body.stream))
        generation = Generation([stream], 1, detaches=may_return or body.detaches(idempotency_key))
        try:
            accepted = await stream.accepted()
            if after >= 0 and not accepted.attached:
                raise not_resumable()
            head = ResponseHead(accepted.request_id, annotation, accepted.created_unix_s)
            if body.stream:
                return await self._streamed(head, stream, generation, after=after)
            if annotation.background:
                stream.detach()
                return await self.retrieve(head.response_id) if accepted.attached else _json(head.beginning("queued"))
            return _json(head.at(await self._end(head, stream)))
        except BaseException as error:
            await generation.close()
            if isinstance(error, quire.QuireError):
                told = GrammarFaults(keywords, body.tool_use).told(error)
                raise from_quire(told, body.names, stream.request_id) from error
            raise  # the reader has gone

    async def retrieve(self, response_id: str) -> Response:
        """The response as it is now."""
        return _json(await self._object(await self._stored.get(response_id)))

    async def resume(self, response_id: str, after: int) -> Response:
        """The events of a response behind the one with this number; -1: all of them."""
        stored = await self._stored.get(response_id)
        stream = self._client.attach(response_id)
        generation = Generation([stream], 1, detaches=True)
        try:
            return await self._streamed(stored.head, stream, generation, after=after)
        except BaseException:  # the reader has gone, or the request
            await generation.close()
            raise

    async def cancel(self, response_id: str) -> Response:
        """End a response, and return it; one that has ended stays as it is."""
        await self._stored.get(response_id)
        await self._client.cancel(response_id)
        return await self.retrieve(response_id)

    async def delete(self, response_id: str) -> Response:
        """Delete a response; one that has not ended is cancelled."""
        await self._stored.get(response_id)
        await self._client.cancel(response_id)
        await self._client.delete_record(response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, response_id: str, *, limit: int, order: str, after: str | None) -> Response:
        """One page of the items of a response's own input, without those of the responses before it."""
        stored = await self._stored.get(response_id)
        items = [each.to_item(item_id) for item_id, each in stored.input.items()]
        if order == "desc":
            items.reverse()
        if after is not None:
            found = next((number for number, item in enumerate(items) if item["id"] == after), None)
            if found is None:
                raise invalid("after", "no item of this input has the id")
            items = items[found + 1 :]
        page = items[:limit]
        ids = [item["id"] for item in page]
        return _json(
            {
                "object": "list",
                "data": page,
                "first_id": ids[0] if ids else None,
                "last_id": ids[-1] if ids else None,
                "has_more": len(items) > limit,
            }
        )

    async def count_input(self, body: ResponseRequest) -> Response:
        """The number of tokens that a request would have as its prompt."""
        body.check()
        await self._model.check(body.model)
        items = await self._references.resolve(items_of(body.input or []), body.tenant)
        with sdk_refusals(body.names):
            tokens = await self._client.tokenize(body.chat(await self._turns(body, items)))
        return _json({"object": "response.input_tokens", "input_tokens": len(tokens.token_ids)})

    async def compact(self, body: CompactionRequest) -> Response:
        """A conversation as one item."""
        return _json(await self._compactions.compact(body))

    async def _turns(self, body: ResponseRequest, items: list[InputItem]) -> list[quire.ChatMessage]:
        """The conversation to go on with: instructions, responses before this one, input."""
        instructions = [] if body.instructions is None else [quire.ChatMessage("system", body.instructions)]
        turns = []
        if body.previous_response_id is not None:
            turns = await self._stored.conversation(body.previous_response_id, body.tenant)
        turns += turns_of(items)
        model = await self._model.get()
        turns = [templated(each, model.answer_format) for each in turns]
        if body.truncation != "auto":
            return instructions + turns
        most_tokens = model.max_model_len - (body.max_output_tokens or model.max_model_len // ANSWER_PART)
        kept = await last_turns_that_fit(
            self._client, lambda last: body.chat([*instructions, *last]), turns, most_tokens
        )
        return instructions + kept

    async def _object(self, stored: StoredResponse) -> dict[str, Any]:
        head, record = stored.head, stored.record
        if record.state.is_terminal and stored.annotation.has_logprobs:  # records do not have them, streams do
            return head.at(await self._end(head, self._client.attach(record.request_id)))
        return head.at(Snapshot.of_record(record, self._output(head, in_reasoning=record.in_reasoning)))

    def _output(self, head: ResponseHead, *, in_reasoning: bool) -> Output:
        return Output(head.response_id, head.annotation, self._vocabulary, in_reasoning=in_reasoning)

    async def _end(self, head: ResponseHead, stream: quire.CompletionStream) -> Snapshot:
        """The end of a response, whatever it is, once it has come."""
        output = self._output(head, in_reasoning=(await stream.accepted()).in_reasoning)
        async for chunk in _chunks(stream):
            await self._vocabulary.load(ids_of(chunk.logprobs))
            for number, token in enumerate(single_tokens(chunk), 1):
                output.add(token)
                if token.logprobs and not number % MOST_AT_ONCE:
                    await next_turn()
        output.end()
        return Snapshot.of_end(_outcome(stream), output)

    async def _streamed(
        self, head: ResponseHead, stream: quire.CompletionStream, generation: Generation, *, after: int
    ) -> EventStream:
        output = self._output(head, in_reasoning=(await stream.accepted()).in_reasoning)
        events = ResponseEvents(head, output, after=after)
        return EventStream(generation, self._steps(events, generation, stream), {ID_HEADER: head.response_id})

    def _steps(self, events: ResponseEvents, generation: Generation, stream: quire.CompletionStream) -> Steps:
        try:
            yield events.begin()
            while (chunk := _taken(generation, stream)) is not None or not stream.is_at_end:
                if chunk is None:
                    yield None
                    continue
                if chunk.logprobs and (loading := self._vocabulary.loading(ids_of(chunk.logprobs))):
                    yield loading
                yield from _of_chunk(events, chunk)
            yield events.end(_outcome(stream))
        except quire.QuireError as error:
            yield events.error(from_quire(error, {}, stream.request_id))
        yield DONE


def _of_chunk(events: ResponseEvents, chunk: quire.Chunk) -> Steps:
    """Events of a chunk; of very many tokens with log-probabilities in several turns."""
    made = b""
    for number, part in enumerate(single_tokens(chunk) if chunk.logprobs else (chunk,), 1):
        made += events.add(part)
        if not number % MOST_AT_ONCE:
            if made:
                yield made
            yield next_turn
            made = b""
    if made:
        yield made


def _taken(generation: Generation, stream: quire.CompletionStream) -> quire.Chunk | None:
    """The next chunk that has arrived of a generation's only stream; otherwise as `_chunks`."""
    try:
        found = generation.take()
    except quire.QuireError:
        if stream.outcome is None:
            raise
        return None
    return None if found is None else found[1]


async def _chunks(stream: quire.CompletionStream) -> AsyncGenerator[quire.Chunk, None]:
    """Chunks to the end of the request; a request that failed has an outcome, too. Raises if the end is not known."""
    try:
        async for chunk in stream:
            yield chunk
    except quire.QuireError:
        if stream.outcome is None:
            raise


def _outcome(stream: quire.CompletionStream) -> quire.Outcome:
    assert stream.outcome is not None  # it was read to the end
    return stream.outcome


def _json(answer: dict[str, Any]) -> Response:
    headers = {ID_HEADER: answer["id"]} if "id" in answer else {}
    return Response(orjson.dumps(answer), media_type="application/json", headers=headers)
