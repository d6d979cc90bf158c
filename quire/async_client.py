"""The client for asyncio. All requests of a client travel over one stream, so make one client and share it.

Knows the calls and their results; the session makes requests survive a broken connection.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeVar, Unpack

from quire.address import check_address
from quire.answer_reader import AnswerReader
from quire.client_home import CLOSED, ClientHome, refuse_copy
from quire.connection import INFERENCE_SERVICE, Connection
from quire.credentials import Credentials
from quire.deployment import Deployment
from quire.errors import FieldViolation, InvalidRequestError, NotFoundError, RetryableError, UnavailableError
from quire.keywords import in_keywords
from quire.merging import merged_prefixes, merged_stats, page_of_shard, shard_of_page, shard_of_stats
from quire.open_request import OpenRequest
from quire.params import (
    DEFAULT_ADDRESS,
    PIN_TIMEOUT_S,
    Chat,
    ClientKeywords,
    GenerateParams,
    Messages,
    OnDisconnect,
    PauseKeep,
    Tools,
    check_seconds,
    client_options,
    gather,
)
from quire.parsing.answer_format import AnswerFormat, names_of_tools
from quire.request_list import LiveState, RequestPage
from quire.results import Completion, Health, Model, PinnedPrefix, RequestRecord, RequestState, Tokens
from quire.session_entry import Entry
from quire.shards import MOST_SHARDS, Shard
from quire.stats import Stats
from quire.stream import CompletionStream
from quire.v1 import cluster_pb2
from quire.v1 import inference_pb2 as pb
from quire.wire_chat import chat_to_pb
from quire.wire_requests import (
    encode,
    list_requests_to_pb,
    pause_to_pb,
    pin_to_pb,
    request_to_pb,
    tokenize_to_pb,
)
from quire.wire_results import (
    model_from_pb,
    prefix_from_pb,
    record_from_pb,
    request_page_from_pb,
    state_from_pb,
)
from quire.wire_stats import stats_from_pb

READY_POLL_S = 0.1


Answer = TypeVar("Answer")


class AsyncClient:
    """A client of one Quire deployment. Connects at the first call; use it within one event loop.

    The address may be several with commas between, or a name that has several: the client finds which server leads.
    A process that was forked from one with a client that has made a call cannot use clients; all else it can do. If the
    program imports grpc before quire, that takes GRPC_ENABLE_FORK_SUPPORT=0 in its environment.

    Calls raise a `quire.QuireError`: its class tells the kind of failure, its message what to do about it. TypeError
    and ValueError are for arguments that are wrong without asking a server, RuntimeError for a client that is closed or
    used where it cannot be.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, **options: Unpack[ClientKeywords]) -> None:
        self.address = check_address(address)
        self._options = client_options(options)
        self._credentials = Credentials(
            api_key=self._options.api_key,
            tls_root=self._options.tls_root,
            tls_server_name=self._options.tls_server_name,
            tls_client_cert=self._options.tls_client_cert,
            tls_client_key=self._options.tls_client_key,
        )
        self._home = ClientHome()
        self._deployment: Deployment | None = None
        self._is_closed = False

    async def generate(self, prompt: str | Sequence[int], **params: Unpack[GenerateParams]) -> Completion:
        """Continues a prompt, given as text or token ids, to its end. Cancelling the call cancels the request."""
        async with self.stream(prompt, **params) as stream:
            return await stream.completion()

    def stream(self, prompt: str | Sequence[int], **params: Unpack[GenerateParams]) -> CompletionStream:
        """Submits a prompt now and streams its output; chunks of several samples alternate."""
        return self._submit(prompt, params)

    async def chat(
        self,
        messages: Messages,
        *,
        continue_final_message: bool = False,
        tools: Tools | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        answer_format: AnswerFormat | None = None,
        **params: Unpack[GenerateParams],
    ) -> Completion:
        """Answers a conversation by the model's chat template; see `stream_chat`."""
        stream = self.stream_chat(
            messages,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
            answer_format=answer_format,
            **params,
        )
        async with stream:
            return await stream.completion()

    def stream_chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Tools | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        answer_format: AnswerFormat | None = None,
        **params: Unpack[GenerateParams],
    ) -> CompletionStream:
        """Submits a conversation now and streams the answer.

        Args:
            messages: turns of the conversation.
            add_generation_prompt: open the assistant's turn at the end; None: unless the last message is continued.
            continue_final_message: continue the content of the last message instead of answering it.
            tools: tools that the model may call, in the form of OpenAI's API, for the chat template.
            template_kwargs: further variables of the template, such as enable_thinking.
            answer_format: the model's (`Model.answer_format`): parts the text of each chunk into `deltas` of content,
                reasoning and, with tools, calls; samples get a `message`. The text keeps its special tokens then.
            params: parameters of the request.
        """
        chat = chat_to_pb(
            Chat(
                messages=messages,
                tools=tools,
                template_kwargs=template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        )
        if answer_format is None:
            return self._submit(chat, params)
        if not isinstance(answer_format, AnswerFormat):
            raise TypeError(f"answer_format must be AnswerFormat, not {type(answer_format).__name__}")
        names = names_of_tools(tools or ())
        answer_format = answer_format.offering(names) if names else answer_format.without_calls()
        if not answer_format.is_plain:
            params["keep_special_tokens"] = True  # markers may be such
        return self._submit(chat, params, answer_format)

    def new_request_id(
        self,
        prompt: str | Sequence[int] | Chat | None = None,
        *,
        prefix: str = "",
        cache_salt: str | None = None,
        tenant: str | None = None,
        session_key: str | None = None,
    ) -> str:
        """Makes an id for a request that you submit with it. Of several shards it names the one that serves it best.

        Args:
            prompt: of the request, which goes where its beginning is known.
            prefix: of the id.
            cache_salt: of the request.
            tenant: of the request.
            session_key: of the request, which goes to the shard of its session.
        """
        deployment = self._deployed()
        beginning: str | Sequence[int] | pb.ChatPrompt = ""
        if not isinstance(prompt, Chat):
            beginning = "" if prompt is None else prompt
        elif deployment.has_choice:
            with suppress(InvalidRequestError):  # its request will be refused
                beginning = chat_to_pb(prompt)
        return deployment.new_id(beginning, salt=cache_salt, tenant=tenant, prefix=prefix, session_key=session_key)

    def attach(self, request_id: str, from_position: int | Sequence[int] = 0) -> CompletionStream:
        """Reads a request that was submitted before, here or elsewhere, from a position of its output onwards.

        A single position is for the first sample; a list has one for each sample. Missing ones are 0.
        """
        positions = [from_position] if isinstance(from_position, int) else from_position
        wanted = encode(pb.Attach, request_id=request_id, from_positions=positions)
        first = list(wanted.from_positions)
        request = OpenRequest(request_id, from_positions=first, buffer_tokens=self._options.buffer_tokens)
        entry = Entry(request=request, submission=None, deadline_s=None, holds_when_behind=True)
        return self._open(entry, cancels_on_close=False)

    async def cancel(self, request_id: str) -> RequestState:
        """Cancels a request and returns its state; one that has ended stays as it is."""
        request = encode(pb.CancelRequest, request_id=request_id)
        answer = await self._deployed().of_request(request_id, lambda at: at.call(at.inference.Cancel, request))
        return state_from_pb(answer.state)

    async def pause(self, request_id: str, keep: PauseKeep = "auto") -> RequestState:
        """Takes a request off its worker until `resume`, also across restarts; returns once the pause is durable.

        Its stream waits meanwhile; its deadline and its on_disconnect go on counting. The tokens of steps that run
        already still come, and may end it. Repeating it is harmless. Raises NotFoundError, FailedPreconditionError if
        the request has ended.

        Args:
            request_id: id of the request.
            keep: "auto" moves its KV to the worker's host pool if there is room; "tokens" keeps only the tokens, and
                the KV is computed again.
        """
        request = pause_to_pb(request_id, keep)
        answer = await self._deployed().of_request(request_id, lambda at: at.call(at.inference.Pause, request))
        return state_from_pb(answer.state)

    async def resume(self, request_id: str) -> RequestState:
        """Continues a paused request exactly where it was, in the order of its arrival. Raises as `pause`."""
        request = encode(pb.ResumeRequest, request_id=request_id)
        answer = await self._deployed().of_request(request_id, lambda at: at.call(at.inference.Resume, request))
        return state_from_pb(answer.state)

    async def get(self, request_id: str) -> RequestRecord:
        """State and output so far of a request, also after its end until its record expires.

        Raises NotFoundError, FailedPreconditionError if that is more than a message holds: read it by `attach`.
        """
        request = encode(pb.GetRequestRequest, request_id=request_id)
        answer = await self._deployed().of_request(request_id, lambda at: at.call(at.inference.GetRequest, request))
        return record_from_pb(answer)

    async def delete_record(self, request_id: str) -> None:
        """Deletes the record of an ended request; its id stays taken until the record would have expired.

        Raises NotFoundError, also where the connection broke and it was deleted before the call was repeated,
        FailedPreconditionError if the request has not ended.
        """
        request = encode(pb.DeleteRecordRequest, request_id=request_id)
        await self._deployed().of_request(request_id, lambda at: at.call(at.inference.DeleteRecord, request))

    async def list_requests(
        self,
        *,
        tenant: str | None = None,
        state: LiveState | str | Sequence[LiveState | str] | None = None,
        page_size: int = 100,
        page_token: str | None = None,
    ) -> RequestPage:
        """Requests that have not ended, in the order of their arrival, and what each waits for; shard after shard.

        Args:
            tenant: tenant whose requests are listed; None: all tenants.
            state: one state or several, such as "queued"; None: all.
            page_size: at most this many, up to 1,000.
            page_token: the `next_page_token` of the previous page, for the same tenant and states.
        """
        shards = await self._deployed().known_shards()
        shard, token = shard_of_page(page_token, shards)
        request = list_requests_to_pb(tenant, state, page_size, token)
        at = self._deployed().connection_to(shard)
        page = request_page_from_pb(await at.call(at.inference.ListRequests, request))
        return page_of_shard(page, shard, shards)

    async def tokenize(
        self,
        text: str | Chat | Messages,
        *,
        add_special_tokens: bool = True,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> Tokens:
        """Token ids of a text or a conversation, as the model would see it in a prompt; see `stream_chat`.

        A `Chat` says itself how it ends.
        """
        if not isinstance(text, str | Chat):
            text = Chat(
                messages=text,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        try:
            request = tokenize_to_pb(text, add_special_tokens)
            connection = await self._deployed().any()
            answer = await connection.call(connection.inference.Tokenize, request)
        except InvalidRequestError as error:
            raise in_keywords(error, "text") from error
        return Tokens(tuple(answer.token_ids), tuple(answer.tokens))

    async def detokenize(self, token_ids: Sequence[int], *, keep_special_tokens: bool = False) -> str:
        """The text of token ids."""
        connection = await self._deployed().any()
        request = encode(pb.DetokenizeRequest, token_ids=token_ids, keep_special_tokens=keep_special_tokens)
        answer = await connection.call(connection.inference.Detokenize, request)
        return answer.text

    async def token_pieces(self, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """The bytes that each token adds within a text; a token may be a part of a character."""
        connection = await self._deployed().any()
        request = encode(pb.DetokenizeRequest, token_ids=token_ids, keep_special_tokens=True, pieces=True)
        return tuple((await connection.call(connection.inference.Detokenize, request)).pieces)

    async def pin_prefix(
        self,
        name: str,
        prefix: str | Sequence[int] | Chat | Messages,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        timeout_s: float = PIN_TIMEOUT_S,
    ) -> PinnedPrefix:
        """Computes a prefix, given as text, token ids or messages, and keeps it; returns once a worker has it.

        Requests of the same tenant and salt whose prompts begin with it reuse its blocks. The same name and prefix
        again returns the existing pin. Raises AlreadyExistsError if the name belongs to another prefix, OverloadedError
        if its memory is promised to requests.
        """
        check_seconds("timeout_s", timeout_s)
        try:
            request = pin_to_pb(name, prefix, tenant, cache_salt)
            taking = (await self._deployed().taking()).values()
            answers = await asyncio.gather(
                *(at.call(at.inference.PinPrefix, request, timeout_s, is_short=False) for at in taking)
            )
        except InvalidRequestError as error:
            raise in_keywords(error, "prefix") from error
        return prefix_from_pb(answers[0].prefix, created=any(answer.created for answer in answers))

    async def unpin_prefix(self, name: str, *, tenant: str | None = None) -> None:
        """Lets a prefix be evicted again. Raises NotFoundError if the tenant has no such pin."""
        request = encode(pb.UnpinPrefixRequest, name=name, tenant=tenant)
        await self._of_any(lambda at: at.call(at.inference.UnpinPrefix, request))

    async def list_prefixes(self, *, tenant: str | None = None) -> tuple[PinnedPrefix, ...]:
        """The pinned prefixes of one tenant, by name."""
        request = encode(pb.ListPrefixesRequest, tenant=tenant)
        answers = await self._of_all(lambda at: at.call(at.inference.ListPrefixes, request))
        return merged_prefixes([prefix_from_pb(each) for answer in answers for each in answer.prefixes])

    async def model(self) -> Model:
        """The model being served."""
        connection = await self._deployed().any()
        return model_from_pb(await connection.call(connection.inference.GetModel, pb.GetModelRequest()))

    async def stats(self) -> Stats:
        """Snapshot of running and waiting requests and of the use of the KV memory."""
        answers = await self._of_all(lambda at: at.call(at.inference.GetStats, pb.GetStatsRequest()))
        return merged_stats([stats_from_pb(answer) for answer in answers])

    async def shards(self) -> tuple[Shard, ...]:
        """The shards of the deployment, who leads them, and what runs there, as it was published lately; mostly one."""
        shards: tuple[Shard, ...] = (Shard(number=0),)
        with suppress(UnavailableError):
            shards = tuple(await self._deployed().known_shards())
            if len(shards) == 1 and not shards[0].leader:  # the only one publishes nothing
                at = self._deployed().first
                stats = stats_from_pb(await at.call(at.inference.GetStats, pb.GetStatsRequest()))
                return (shard_of_stats(stats, at.server),)
        return shards

    async def set_shards(self, num_shards: int) -> int:
        """Changes the number of shards, while requests run; returns how many take new requests at that moment.

        Fewer do so at once; more do so when each of the new ones has a leader and a worker, as `shards` shows.
        Repeating it is harmless. Raises InvalidRequestError, and FailedPreconditionError if the store is the
        scheduler's memory.

        Args:
            num_shards: from 1 to 999.
        """
        if isinstance(num_shards, int) and not 1 <= num_shards <= MOST_SHARDS:  # the wire takes other numbers
            violation = FieldViolation("num_shards", f"is {num_shards}: give 1 to {MOST_SHARDS}")
            raise InvalidRequestError.of([violation])
        request = encode(cluster_pb2.SetShardsRequest, num_shards=num_shards)
        connection = self._deployed().first
        return (await connection.call(connection.cluster.SetShards, request)).num_shards

    async def drain_worker(self, worker_id: str, *, undo: bool = False) -> int:
        """Takes a worker out of service, or with `undo` back into it. Returns the number of sequences still on it.

        The worker gets nothing new. Its sequences move to other workers, or end there if there is no other. It serves
        again after a restart. Raises NotFoundError if no such worker is registered.
        """
        request = encode(cluster_pb2.DrainWorkerRequest, worker_id=worker_id, undo=undo)
        answers = await self._of_any(lambda at: at.call(at.cluster.DrainWorker, request))
        return answers[0].num_running

    async def health(self, service: str = INFERENCE_SERVICE) -> Health:
        """Health of the service. Raises UnavailableError if nothing answers."""
        return await self._deployed().first.health(service)

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Waits until the server can generate. Raises UnavailableError after `timeout_s`."""
        why = f"the server at {self.address} has not answered"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        if await self.health() is Health.SERVING:
                            return
                        why = f"the server at {self.address} answers, but has no worker yet"
                        await self._deployed().first.look_for_leader()
                    except (RetryableError, NotFoundError) as error:
                        why = error.message
                    await asyncio.sleep(READY_POLL_S)
        except TimeoutError:
            raise UnavailableError(f"the server is not ready after {timeout_s} s: {why}") from None

    async def close(self) -> None:
        """Detaches from every open request; its on_disconnect decides whether it goes on.

        Calls that wait for their answer raise RuntimeError; whoever reads a request, as `generate` and `chat` do, gets
        RequestCancelledError, also where the request goes on. Raises RuntimeError in another event loop, unless that of
        the client's calls is closed.
        """
        deployment = None if self._home.has_ended else self._deployment
        if deployment is not None:
            self._home.enter_loop()
        self._is_closed = True
        if deployment is not None:
            await deployment.close()
        self._deployment = None

    def __reduce__(self) -> NoReturn:
        refuse_copy(self, "make one where it is needed, in each process")

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _deployed(self) -> Deployment:
        if self._is_closed:
            raise RuntimeError(CLOSED)
        self._home.enter_loop()
        if self._deployment is None:
            self._deployment = Deployment(self.address, self._options, self._credentials)
        return self._deployment

    async def _of_all(self, call: Callable[[Connection], Awaitable[Answer]]) -> list[Answer]:
        """Answers of all shards."""
        return await asyncio.gather(*(call(connection) for connection in (await self._deployed().all()).values()))

    async def _of_any(self, call: Callable[[Connection], Awaitable[Answer]]) -> list[Answer]:
        """Answers of the shards that find what the call names. Raises NotFoundError if none does."""
        answers: list[Answer] = []
        missing: NotFoundError | None = None
        for connection in (await self._deployed().all()).values():
            try:
                answers.append(await call(connection))
            except NotFoundError as error:
                missing = error
        if not answers and missing is not None:
            raise missing
        return answers

    def _submit(
        self,
        prompt: "str | Sequence[int] | pb.ChatPrompt",
        keywords: GenerateParams,
        answer_format: AnswerFormat | None = None,
    ) -> CompletionStream:
        if self._options.timeout_s is not None:
            keywords.setdefault("timeout_s", self._options.timeout_s)
        if not keywords.get("request_id"):
            keywords["request_id"] = self._deployed().new_id(
                prompt,
                salt=keywords.get("cache_salt"),
                tenant=keywords.get("tenant"),
                session_key=keywords.get("session_key"),
            )
        params = gather(keywords)
        submission = request_to_pb(prompt, params)
        answers = None
        if answer_format is not None:
            constraint = params.structured_output
            answers = AnswerReader(answer_format, may_reason=constraint is None or constraint.has_reasoning)
        request = OpenRequest(submission.request_id, from_positions=(), buffer_tokens=self._options.buffer_tokens)
        now_s = asyncio.get_running_loop().time()
        entry = Entry(
            request=request,
            submission=submission,
            deadline_s=None if params.timeout_s is None else now_s + params.timeout_s,
            holds_when_behind=params.on_disconnect is OnDisconnect.CANCEL,
        )
        return self._open(entry, cancels_on_close=True, answers=answers)

    def _open(self, entry: Entry, *, cancels_on_close: bool, answers: AnswerReader | None = None) -> CompletionStream:
        session = self._deployed().open(entry)
        return CompletionStream(session, entry.request, cancels_on_close=cancels_on_close, answers=answers)
