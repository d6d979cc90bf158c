"""`/v1/chat/completions`: conversations, answered whole or as events."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response

import quire
from gateway_svc.answering import answer
from gateway_svc.api_error import invalid, sdk_refusals
from gateway_svc.call_grammars import CallGrammars
from gateway_svc.event_stream import Wait
from gateway_svc.generation import Generation
from gateway_svc.grammar_faults import GrammarFaults
from gateway_svc.openai.chat_request import ChatRequest
from gateway_svc.openai.completion_call import CompletionCall, stop_reason
from gateway_svc.openai.logprobs import chat_logprobs, objects_in_turns, whole_prompt_logprobs
from gateway_svc.openai.tools import MessageDelta, message_object
from gateway_svc.request_fields import new_request_id
from gateway_svc.resumption import event_counts
from gateway_svc.served_model import ServedModel
from gateway_svc.text_templates import TextTemplates
from gateway_svc.tool_use import ends_within_call
from gateway_svc.vocabulary import Vocabulary, ids_of
from quire.answer_reader import AnswerReader
from quire.parsing.answer_format import AnswerFormat
from quire.parsing.deltas import Delta


class Chats:
    """Answers requests for chat completions."""

    def __init__(self, client: quire.AsyncClient, model: ServedModel, vocabulary: Vocabulary) -> None:
        self._client = client
        self._model = model
        self._vocabulary = vocabulary
        self._call_grammars = CallGrammars(client, vocabulary)

    async def answer(
        self, body: ChatRequest, idempotency_key: str | None, last_event_id: str | None = None
    ) -> Response:
        """The answer to a request. Raises ApiError."""
        if body.top_logprobs and not body.logprobs:  # 0 is what vLLM has by default
            raise invalid("top_logprobs", "give logprobs as well")
        name = await self._model.check(body.model)
        tool_use = body.tool_use
        of_model = (await self._model.get()).answer_format
        chat, format = body.chat(of_model), tool_use.format(of_model)
        request_id = new_request_id(self._client, "chatcmpl-", chat, idempotency_key, body)
        call = _Call(body, name, request_id, self._vocabulary)
        counts = event_counts(idempotency_key, last_event_id, body.num_outputs, streamed=bool(body.stream))
        keywords = body.keywords(request_id)
        keywords["text_ends"] = idempotency_key is not None  # whether or not this time it streams
        if not format.is_plain:
            keywords["keep_special_tokens"] = True  # markers may be such
        with sdk_refusals(call.names):
            if body.return_token_ids:  # before anything is submitted that a failure would leave behind
                call.prompt_token_ids = (await self._client.tokenize(chat)).token_ids
            format = await self._call_grammars.constrain(keywords, format, chat, tool_use)
            call.faults = GrammarFaults(keywords, tool_use)
            stream = self._client.stream_chat(
                chat.messages,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                tools=chat.tools,
                template_kwargs=chat.template_kwargs,
                answer_format=None if body.stream else format,  # events are of single tokens
                **keywords,
            )
        call.read(format)
        generation = Generation([stream], body.num_outputs, detaches=body.detaches(idempotency_key))
        return await answer(generation, call, streamed=bool(body.stream), counts=counts)


class _Call(CompletionCall):
    """One request for a chat completion: makes its objects of the output."""

    def __init__(self, body: ChatRequest, model: str, request_id: str, vocabulary: Vocabulary) -> None:
        super().__init__(body, "chat.completion.chunk" if body.stream else "chat.completion", model, request_id)
        self._body = body
        self._vocabulary = vocabulary
        self._parallel_calls = body.tool_use.may_call_several
        self._has_reasoning = body.include_reasoning is not False
        self.prompt_token_ids: Sequence[int] | None = None  # to be returned
        self._arguments: dict[int, list[str]] = {}  # of the last call so far, by output
        self._accepted: quire.Accepted | None = None
        self._answers = AnswerReader(AnswerFormat())
        self._content_events = TextTemplates(
            lambda output, text: self.choice_event(_choice_of(output, {"content": text}, None, None))
        )

    def read(self, format: AnswerFormat) -> None:
        """Read answers in this format."""
        self._answers = AnswerReader(format)

    def begin(self, accepted: Sequence[quire.Accepted]) -> None:
        """See Call."""
        super().begin(accepted)
        self._accepted = accepted[0]

    async def whole(self, completions: Sequence[quire.Completion], usage: quire.Usage) -> bytes:
        """The whole answer."""
        choices = []
        for sample in completions[0].samples:
            await self._vocabulary.load(self._named_ids(sample.logprobs))
            assert sample.message is not None, "answers are parsed"
            message = message_object(
                sample.message, parallel_calls=self._parallel_calls, has_reasoning=self._has_reasoning
            )
            calls = message.get("tool_calls")
            arguments = calls[-1]["function"]["arguments"] if calls else None
            choice: dict[str, Any] = {
                "index": sample.index,
                "message": message,
                "logprobs": await self._whole_logprobs(sample.logprobs),
                "finish_reason": _reason(quire.Finish(sample.finish_reason, sample.stop_cause), arguments),
                "stop_reason": stop_reason(sample.stop_cause),
            }
            if self._body.return_token_ids:
                choice["token_ids"] = sample.token_ids
            choices.append(choice)
        return self.to_json(choices, usage, **self._ids_of_prompt(), **await self._prompt_logprobs(completions[0]))

    def first_events(self, num_prompt_tokens: int) -> Iterable[bytes]:
        """An event for each output, which says who speaks; a forced call has no content, as in OpenAI's API."""
        delta = {"role": "assistant", "content": None if self._body.tool_use.is_forced else "", "refusal": None}
        for output in range(self._body.num_outputs):
            ids = {} if output else self._ids_of_prompt()
            yield self.choice_event(_choice_of(output, delta, None, None), **ids)

    def preparation(self, output: int, chunk: quire.Chunk) -> Wait | None:
        """See Call."""
        return self._vocabulary.loading(self._named_ids(chunk.logprobs)) if chunk.logprobs else None

    def event(self, output: int, chunk: quire.Chunk) -> bytes:
        """See Call."""
        assert self._accepted is not None, "it has begun"
        deltas = self._answers.deltas_of(self._accepted, chunk)
        has_more = chunk.logprobs or chunk.finish or (self._body.return_token_ids and chunk.token_ids)
        match deltas:
            case (quire.ContentDelta(text),) if not (has_more or self.has_continuous_usage):  # nearly all
                return self._content_events.fill(output, text)
        delta = self._delta(deltas)
        choices = self._choices(output, delta, chunk) if delta.fields or has_more else ()
        return b"".join(map(self.choice_event, choices))

    def _choices(self, output: int, delta: MessageDelta, chunk: quire.Chunk) -> Iterator[dict[str, Any]]:
        """Pieces of an answer, each for an event.

        Calls do not come with the end: the stream helpers of OpenAI's clients tell that a call is whole when an event
        behind its last one comes.
        """
        if chunk.finish and delta.calls:
            yield self._choice(output, delta, replace(chunk, finish=None))
            delta, chunk = self._delta(()), replace(chunk, token_ids=(), logprobs=())
        yield self._choice(output, delta, chunk)

    def _delta(self, deltas: Sequence[Delta]) -> MessageDelta:
        return MessageDelta(deltas, parallel_calls=self._parallel_calls, has_reasoning=self._has_reasoning)

    def _choice(self, output: int, delta: MessageDelta, chunk: quire.Chunk) -> dict[str, Any]:
        for call in delta.calls:
            if "id" in call:
                self._arguments[output] = []
            self._arguments[output].append(call["function"]["arguments"])
        reason = None
        if chunk.finish:
            pieces = self._arguments.get(output)
            reason = _reason(chunk.finish, None if pieces is None else "".join(pieces))
        choice = _choice_of(output, delta.fields, self._logprobs(chunk.logprobs) if chunk.logprobs else None, reason)
        if chunk.finish:
            choice["stop_reason"] = stop_reason(chunk.finish.cause)
        if self._body.return_token_ids and chunk.token_ids:
            choice["token_ids"] = chunk.token_ids
        return choice

    def _ids_of_prompt(self) -> dict[str, Any]:
        return {} if self.prompt_token_ids is None else {"prompt_token_ids": self.prompt_token_ids}

    async def _prompt_logprobs(self, completion: quire.Completion) -> dict[str, Any]:
        num_top = self._body.prompt_logprobs
        if num_top is None:
            return {}
        found = await whole_prompt_logprobs(completion.prompt_logprobs, num_top, self._vocabulary)
        return {"prompt_logprobs": found}

    def _named_ids(self, logprobs: Sequence[quire.TokenLogprobs]) -> Iterable[int]:
        """Tokens that the log-probabilities which come back name."""
        return ids_of(logprobs) if self._body.logprobs else ()

    def _logprobs(self, logprobs: Sequence[quire.TokenLogprobs]) -> dict[str, Any] | None:
        """Log-probabilities of an event."""
        return {"content": self._objects(logprobs), "refusal": None} if self._body.logprobs else None

    async def _whole_logprobs(self, logprobs: Sequence[quire.TokenLogprobs]) -> dict[str, Any] | None:
        """Log-probabilities of a whole answer."""
        if not self._body.logprobs:
            return None
        return {"content": await objects_in_turns(self._objects, logprobs), "refusal": None}

    def _objects(self, logprobs: Sequence[quire.TokenLogprobs]) -> list[dict[str, Any]]:
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return chat_logprobs(logprobs, self._body.top_logprobs or 0, self._vocabulary, as_ids=as_ids)


def _choice_of(
    output: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None
) -> dict[str, Any]:
    """The next piece of an answer."""
    return {"index": output, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _reason(finish: quire.Finish, arguments: str | None) -> str:
    """Reason of an output's end, for the client; `arguments` are those of its last call, None: it has no calls."""
    if arguments is None or finish.reason is not quire.FinishReason.STOP or ends_within_call(finish.cause, arguments):
        return finish.reason.value
    return "tool_calls"
