"""`/v1/completions`: prompts as text or token ids, answered whole or as events."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field
from starlette.responses import Response

import quire
from gateway_svc.answering import answer
from gateway_svc.api_error import invalid, sdk_refusals
from gateway_svc.event_stream import Wait
from gateway_svc.generation import Generation
from gateway_svc.openai.completion_call import CompletionCall, stop_reason
from gateway_svc.openai.fields import MAX_LOGPROBS, GenerationFields
from gateway_svc.openai.logprobs import CompletionLogprobs, in_turns, joined, slices, whole_prompt_logprobs
from gateway_svc.openai.vllm_fields import VllmCompletionFields
from gateway_svc.request_fields import Items, Unsupported, new_request_id
from gateway_svc.resumption import event_counts
from gateway_svc.served_model import ServedModel
from gateway_svc.text_templates import TextTemplates
from gateway_svc.vocabulary import Vocabulary, ids_of
from quire.params import GenerateParams

MAX_PROMPTS = 128
_DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRequest(GenerationFields, VllmCompletionFields):
    """The body of a request for completions."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]] = Field(
        description="Text or token ids, of one or several."
    )
    max_tokens: int | None = Field(None, ge=0, description="Default: 16; 0 with echo alone.")
    echo: bool | None = Field(None, description="Begin the output with the prompt.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Most likely tokens to return, too.")
    best_of: int | None = None
    add_special_tokens: bool | None = Field(None, description="False: texts without the tokens that begin a prompt.")
    suffix: Unsupported

    @property
    def names(self) -> Mapping[str, str]:
        """See GenerationFields."""
        return {**super().names, **dict.fromkeys(("text", "token_ids"), "prompt")}  # where it is looked at by itself

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt. Raises ApiError if there is none, or too many."""
        given = self.prompt
        prompts: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise invalid("prompt", f"give 1 to {MAX_PROMPTS} prompts, not {len(prompts)}")
        return prompts

    def keywords(self, request_id: str) -> GenerateParams:
        """Keywords for the SDK."""
        given = self.params(request_id)
        given["max_tokens"] = max(1, _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens)
        given["token_ids"] = bool(self.return_token_ids)
        if self.best_of is not None:
            given["best_of"] = self.best_of
        if self.logprobs is not None:
            given["logprobs"] = self.logprobs
            if self.echo:
                given["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return given


class Completions:
    """Answers requests for completions."""

    def __init__(self, client: quire.AsyncClient, model: ServedModel, vocabulary: Vocabulary) -> None:
        self._client = client
        self._model = model
        self._vocabulary = vocabulary

    async def answer(
        self, body: CompletionRequest, idempotency_key: str | None, last_event_id: str | None = None
    ) -> Response:
        """The answer to a request; a reader that leaves is noticed by the caller, or by the stream of events."""
        if body.max_tokens == 0 and not body.echo:
            raise invalid("max_tokens", "give at least 1, or 0 together with echo")
        name = await self._model.check(body.model)
        request_id = new_request_id(self._client, "cmpl-", body.prompts[0], idempotency_key, body)
        call = _Call(body, name, request_id, self._vocabulary)
        num_outputs = len(body.prompts) * body.num_outputs
        counts = event_counts(idempotency_key, last_event_id, num_outputs, streamed=bool(body.stream))
        with sdk_refusals(call.names):
            prompts = await self._prompts(body)
            call.prompts = prompts
            streams = []
            for number, (text, ids) in enumerate(prompts):
                keywords = body.keywords(call.id_of(number))
                keywords["text_ends"] = idempotency_key is not None  # whether or not this time it streams
                streams.append(self._client.stream(text if ids is None else ids, **keywords))
        generation = Generation(streams, body.num_outputs, detaches=body.detaches(idempotency_key))
        return await answer(generation, call, streamed=bool(body.stream), counts=counts)

    async def _prompts(self, body: CompletionRequest) -> list[tuple[str, list[int] | None]]:
        """Each prompt as text, if it is echoed or was given so, and as token ids, if these are needed."""
        found: list[tuple[str, list[int] | None]] = []
        for each in body.prompts:
            if isinstance(each, str):
                has_special = body.add_special_tokens is not False
                needs_ids = (body.echo and body.logprobs is not None) or body.return_token_ids or not has_special
                found.append((each, await self._ids(each, add_special_tokens=has_special) if needs_ids else None))
            else:
                text = await self._client.detokenize(each, keep_special_tokens=True) if body.echo else ""
                found.append((text, each))
        return found

    async def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list((await self._client.tokenize(text, add_special_tokens=add_special_tokens)).token_ids)


class _Call(CompletionCall):
    """One request for completions: makes its objects of the output."""

    def __init__(self, body: CompletionRequest, model: str, request_id: str, vocabulary: Vocabulary) -> None:
        super().__init__(body, "text_completion", model, request_id)
        self.body = body
        self.prompts: list[tuple[str, list[int] | None]] = []
        self._vocabulary = vocabulary
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by output
        self._prompt_logprobs: dict[int, Sequence[quire.TokenLogprobs]] = {}  # by prompt
        self._prompt_lists: dict[int, list[dict[str, list[Any]]]] = {}  # by output, of its next event
        self._echoed: set[int] = set()
        self._with_ids: set[int] = set()  # outputs that had their prompt's token ids
        self._is_echo_alone = body.max_tokens == 0  # the token that is computed all the same does not come back
        has_more = body.echo or body.return_token_ids or body.has_continuous_usage
        self._is_text_alone = not has_more and body.logprobs is None  # but for the end
        self._text_events = TextTemplates(lambda output, text: self.choice_event(_choice_of(text, output, None, None)))

    def id_of(self, number: int) -> str:
        """Id of the request of one of the prompts."""
        return self.request_id if number == 0 else f"{self.request_id}-{number}"

    async def whole(self, completions: Sequence[quire.Completion], usage: quire.Usage) -> bytes:
        """The whole answer."""
        choices = []
        for number, completion in enumerate(completions):
            for sample in completion.samples:
                output = number * self.body.num_outputs + sample.index
                await self._vocabulary.load(self._named_ids(output, sample.logprobs, completion.prompt_logprobs))
                lists = await in_turns(self._lists(output, sample.logprobs, completion.prompt_logprobs))
                finish = quire.Finish(sample.finish_reason, sample.stop_cause)
                choice = self._choice(output, sample.text, lists, finish)
                if self.body.return_token_ids:
                    self._add_ids(choice, sample.token_ids)
                if self.body.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = await whole_prompt_logprobs(
                        completion.prompt_logprobs, self.body.prompt_logprobs, self._vocabulary
                    )
                choices.append(choice)
        return self.to_json(choices, self._delivered(usage))

    def last_event(self, usage: quire.Usage) -> bytes:
        """See CompletionCall."""
        return super().last_event(self._delivered(usage))

    def _delivered(self, usage: quire.Usage) -> quire.Usage:
        return replace(usage, completion_tokens=0) if self._is_echo_alone else usage

    def preparation(self, output: int, chunk: quire.Chunk) -> Wait | None:
        """See Call."""
        if self._is_text_alone:
            return None
        loading = self._vocabulary.loading(self._named_ids(output, chunk.logprobs, chunk.prompt_logprobs))
        if not self._names_prompt(output):
            return loading

        async def prepare() -> None:
            if loading is not None:
                await loading()
            self._prompt_lists[output] = await in_turns(self._lists_of_prompt(output, chunk.prompt_logprobs))

        return prepare

    def event(self, output: int, chunk: quire.Chunk) -> bytes:
        """See Call."""
        finish = chunk.finish
        if self._is_text_alone and finish is None:  # nearly all
            return self._text_events.fill(output, chunk.text) if chunk.text else b""
        if self._is_echo_alone:
            self.num_output_tokens = 0
        is_echo = bool(self.body.echo) and output not in self._echoed
        if not (chunk.text or chunk.logprobs or finish or is_echo or (self.body.return_token_ids and chunk.token_ids)):
            return b""
        lists = list(self._lists(output, chunk.logprobs, chunk.prompt_logprobs))
        choice = self._choice(output, chunk.text, lists, finish)
        if self.body.return_token_ids:
            self._add_ids(choice, chunk.token_ids)
        return self.choice_event(choice)

    def _add_ids(self, choice: dict[str, Any], token_ids: Sequence[int]) -> None:
        """Add token ids to a choice of an output, and to the first one those of its prompt."""
        output = choice["index"]
        choice["token_ids"] = () if self._is_echo_alone else token_ids
        if output not in self._with_ids:
            self._with_ids.add(output)
            choice["prompt_token_ids"] = self.prompts[output // self.body.num_outputs][1]

    def _named_ids(
        self, output: int, logprobs: Sequence[quire.TokenLogprobs], prompt_logprobs: Sequence[quire.TokenLogprobs]
    ) -> Iterator[int]:
        """Tokens that the log-probabilities of an output's next choice name."""
        if self.body.logprobs is None:
            return
        yield from ids_of(logprobs)
        if self._names_prompt(output):
            number = output // self.body.num_outputs
            yield from self.prompts[number][1] or ()
            yield from ids_of(self._prompt_logprobs.get(number, prompt_logprobs))

    def _lists(
        self, output: int, logprobs: Sequence[quire.TokenLogprobs], prompt_logprobs: Sequence[quire.TokenLogprobs]
    ) -> Iterator[dict[str, list[Any]]]:
        """Lists of the tokens that an output's next choice names, made slice by slice; none if they were not asked for.

        The pieces of these tokens must be known.
        """
        if self.body.logprobs is None:
            return
        if self._names_prompt(output):
            yield from self._prompt_lists.pop(output, None) or self._lists_of_prompt(output, prompt_logprobs)
        yield from map(self._logprobs_of(output).tokens, slices(() if self._is_echo_alone else logprobs))

    def _lists_of_prompt(
        self, output: int, prompt_logprobs: Sequence[quire.TokenLogprobs]
    ) -> Iterator[dict[str, list[Any]]]:
        number = output // self.body.num_outputs
        prompt, token_ids = self.prompts[number]
        assert token_ids is not None, "an echo with log-probabilities is of token ids"
        # They come with the first of a prompt's outputs.
        prompt_logprobs = self._prompt_logprobs.setdefault(number, prompt_logprobs)
        of_output = self._logprobs_of(output)
        yield of_output.prompt(prompt, token_ids)
        yield from map(of_output.tokens, slices(prompt_logprobs))

    def _names_prompt(self, output: int) -> bool:
        """True if the log-probabilities of an output's next choice begin with those of its prompt."""
        return self.body.logprobs is not None and bool(self.body.echo) and output not in self._echoed

    def _logprobs_of(self, output: int) -> CompletionLogprobs:
        of_output = self._logprobs.get(output)
        if of_output is None:
            assert self.body.logprobs is not None, "they were asked for"
            as_ids = bool(self.body.return_tokens_as_token_ids)
            of_output = CompletionLogprobs(self._vocabulary, self.body.logprobs, as_ids=as_ids)
            self._logprobs[output] = of_output
        return of_output

    def _choice(
        self, output: int, text: str, lists: Sequence[dict[str, list[Any]]], finish: quire.Finish | None
    ) -> dict[str, Any]:
        """A choice with the next text of an output; the first one of an output begins with an echoed prompt.

        `lists`: see `_lists`.
        """
        if self._is_echo_alone:
            text = ""
        if self.body.echo and output not in self._echoed:
            self._echoed.add(output)
            text = self.prompts[output // self.body.num_outputs][0] + text
        return _choice_of(text, output, joined(lists) if lists else None, finish)


def _choice_of(text: str, output: int, logprobs: dict[str, Any] | None, finish: quire.Finish | None) -> dict[str, Any]:
    choice = {"index": output, "text": text, "logprobs": logprobs, "finish_reason": None}
    if finish is not None:
        choice |= {"finish_reason": finish.reason.value, "stop_reason": stop_reason(finish.cause)}
    return choice
