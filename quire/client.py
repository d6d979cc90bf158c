"""The client for code without asyncio: `AsyncClient` on an event loop of its own, in a thread of its own.

Safe to share between threads; their requests travel over the one stream.
"""

import asyncio
import atexit
import concurrent.futures
import contextvars
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeVar, TypeVarTuple, Unpack

from quire.async_client import AsyncClient
from quire.client_home import CLOSED, ClientHome, refuse_copy
from quire.connection import INFERENCE_SERVICE
from quire.params import (
    DEFAULT_ADDRESS,
    PIN_TIMEOUT_S,
    Chat,
    ClientKeywords,
    GenerateParams,
    Messages,
    PauseKeep,
    Tools,
)
from quire.parsing.answer_format import AnswerFormat
from quire.request_list import LiveState, RequestPage
from quire.results import Accepted, Chunk, Completion, Health, Model, PinnedPrefix, RequestRecord, RequestState, Tokens
from quire.shards import Shard
from quire.stats import Stats
from quire.stream import CompletionStream

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _ClientLoop(asyncio.SelectorEventLoop):
    """An event loop that drops what comes for it from other threads once it is closed.

    gRPC hears of the last operations of a loop in any loop of the process, and passes them on; to a closed one it would
    report an error for each.
    """

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        except RuntimeError:
            if not self.is_closed():
                raise
            return asyncio.Handle(callback, args, self, context)


class LoopThread:
    """An event loop that runs in a daemon thread until it is ended."""

    def __init__(self) -> None:
        self._home = ClientHome()
        self._loop = _ClientLoop()
        self._is_ended = False
        self._entering = threading.RLock()  # the garbage collector may end it in any thread, in this one's `run` too
        self._ending: asyncio.Task[None] | None = None
        self._begun: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run_loop, name="quire-client", daemon=True)
        self._thread.start()

    @property
    def is_ended(self) -> bool:
        """True once it was told to end."""
        return self._is_ended

    @property
    def is_current(self) -> bool:
        """True in this thread, where code of users runs if the garbage collector closes what they have left."""
        return threading.current_thread() is self._thread

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine in the loop after the present turn, in this thread, without waiting."""
        task = self._loop.create_task(coroutine)
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the loop; an interrupt of the waiting thread cancels it.

        Raises RuntimeError if the thread was ended, before or meanwhile, in a fork of its process, and in this thread,
        which would wait for itself.
        """
        try:
            self._home.check_process()
            if self.is_current:
                raise RuntimeError("the client's own thread, which collects garbage too, cannot wait for its calls")
        except RuntimeError:
            coroutine.close()
            raise
        with self._entering:
            if self._is_ended:
                coroutine.close()
                raise RuntimeError(CLOSED)
            future: concurrent.futures.Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if self._is_ended:
                raise RuntimeError(CLOSED) from None
            raise
        except BaseException:
            future.cancel()
            raise

    def end(self, last: Coroutine[Any, Any, None]) -> None:
        """Ends the thread, after a last coroutine, without waiting.

        It does nothing the second time, and in a fork of its process, where the thread is not.
        """
        if not self._home.is_here:
            last.close()
            return
        with self._entering:
            if self._is_ended:
                last.close()
                return
            self._is_ended = True
            self._loop.call_soon_threadsafe(self._begin_end, last)

    def join(self) -> None:
        """Waits until the thread has ended; not in itself."""
        if not self.is_current:
            self._thread.join()

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _begin_end(self, last: Coroutine[Any, Any, None]) -> None:
        self._ending = self._loop.create_task(self._end(last))

    async def _end(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancels the loop's other tasks after the last coroutine."""
        try:
            await last
        finally:
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in others:
                    task.cancel()
                await asyncio.wait(others)
            await asyncio.sleep(0)  # the last results reach the threads that wait for them
            self._loop.stop()


class Stream:
    """Chunks of one request, each position once; those of several samples alternate; see `CompletionStream`.

    Keeps its client: one that nobody else refers to is not closed under it.
    """

    def __init__(self, client: "Client", thread: LoopThread, inner: CompletionStream) -> None:
        self._client = client
        self._thread = thread
        self._inner = inner
        self._arrived: deque[Chunk | None] = deque()  # None: the end

    @property
    def request_id(self) -> str:
        return self._inner.request_id

    def accepted(self) -> Accepted:
        """Waits until the request is durable."""
        return self._thread.run(self._inner.accepted())

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Chunk:
        chunk = self._take()
        if chunk is None:
            raise StopIteration
        return chunk

    def completion(self) -> Completion:
        """Reads to the end and returns the whole output, from where the stream began."""
        return self._thread.run(self._inner.completion())

    def close(self) -> None:
        """Closes the stream: cancels the request if this stream submitted it and it has not ended."""
        if self._thread.is_ended:  # closing the client has closed its streams
            return
        if self._thread.is_current:  # a generator around a stream was left, and the garbage collector closes it here
            self._thread.begin(self._inner.aclose())
        else:
            self._thread.run(self._inner.aclose())

    def __reduce__(self) -> NoReturn:
        refuse_copy(self, "attach to its request_id where it is needed")

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self) -> Chunk | None:
        """The next chunk, or None at the end. One that came as an interrupt ended the wait for it is left for later."""
        while True:
            with suppress(IndexError):  # another thread may have taken what came
                return self._arrived.popleft()
            self._thread.run(self._fetch())

    async def _fetch(self) -> None:
        self._arrived.append(await anext(self._inner, None))


class Client:
    """A client of one Quire server, for synchronous code; the methods are those of `AsyncClient`."""

    def __init__(self, address: str = DEFAULT_ADDRESS, **options: Unpack[ClientKeywords]) -> None:
        self._client = AsyncClient(address, **options)
        self._thread = LoopThread()
        self._finalizer = weakref.finalize(self, _close_unwaited, self._client, self._thread)
        self._finalizer.atexit = False
        _open_clients.add(self)

    @property
    def address(self) -> str:
        return self._client.address

    def generate(self, prompt: str | Sequence[int], **params: Unpack[GenerateParams]) -> Completion:
        """Continues a prompt, given as text or token ids, to its end."""
        return self._thread.run(self._client.generate(prompt, **params))

    def stream(self, prompt: str | Sequence[int], **params: Unpack[GenerateParams]) -> Stream:
        """Submits a prompt now and streams its output; chunks of several samples alternate."""
        return self._open(lambda: self._client.stream(prompt, **params))

    def chat(
        self,
        messages: Messages,
        *,
        continue_final_message: bool = False,
        tools: Tools | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        answer_format: AnswerFormat | None = None,
        **params: Unpack[GenerateParams],
    ) -> Completion:
        """Answers a conversation by the model's chat template; see `AsyncClient.stream_chat`."""
        return self._thread.run(
            self._client.chat(
                messages,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=template_kwargs,
                answer_format=answer_format,
                **params,
            )
        )

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
    ) -> Stream:
        """Submits a conversation now and streams the answer; see `AsyncClient.stream_chat`."""
        return self._open(
            lambda: self._client.stream_chat(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=template_kwargs,
                answer_format=answer_format,
                **params,
            )
        )

    def attach(self, request_id: str, from_position: int | Sequence[int] = 0) -> Stream:
        """Reads a request that was submitted before, here or elsewhere; see `AsyncClient.attach` for positions."""
        return self._open(lambda: self._client.attach(request_id, from_position))

    def cancel(self, request_id: str) -> RequestState:
        """Cancels a request and returns its state; one that has ended stays as it is."""
        return self._thread.run(self._client.cancel(request_id))

    def pause(self, request_id: str, keep: PauseKeep = "auto") -> RequestState:
        """Takes a request off its worker until `resume`, also across restarts; see `AsyncClient.pause`."""
        return self._thread.run(self._client.pause(request_id, keep))

    def resume(self, request_id: str) -> RequestState:
        """Continues a paused request exactly where it was."""
        return self._thread.run(self._client.resume(request_id))

    def get(self, request_id: str) -> RequestRecord:
        """State and output so far of a request, also after its end until its record expires."""
        return self._thread.run(self._client.get(request_id))

    def delete_record(self, request_id: str) -> None:
        """Deletes the record of an ended request; its id stays taken until the record would have expired.

        Raises NotFoundError, FailedPreconditionError if the request has not ended.
        """
        self._thread.run(self._client.delete_record(request_id))

    def list_requests(
        self,
        *,
        tenant: str | None = None,
        state: LiveState | str | Sequence[LiveState | str] | None = None,
        page_size: int = 100,
        page_token: str | None = None,
    ) -> RequestPage:
        """Requests that have not ended, and what each waits for; see `AsyncClient.list_requests`."""
        listing = self._client.list_requests(tenant=tenant, state=state, page_size=page_size, page_token=page_token)
        return self._thread.run(listing)

    def new_request_id(
        self,
        prompt: str | Sequence[int] | Chat | None = None,
        *,
        prefix: str = "",
        cache_salt: str | None = None,
        tenant: str | None = None,
        session_key: str | None = None,
    ) -> str:
        """Makes an id for a request that you submit with it; see `AsyncClient.new_request_id`."""

        async def make() -> str:
            return self._client.new_request_id(
                prompt, prefix=prefix, cache_salt=cache_salt, tenant=tenant, session_key=session_key
            )

        return self._thread.run(make())

    def tokenize(
        self,
        text: str | Chat | Messages,
        *,
        add_special_tokens: bool = True,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> Tokens:
        """Token ids of a text or a conversation, as the model would see it in a prompt; see `AsyncClient.tokenize`."""
        tokens = self._client.tokenize(
            text,
            add_special_tokens=add_special_tokens,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self._thread.run(tokens)

    def detokenize(self, token_ids: Sequence[int], *, keep_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return self._thread.run(self._client.detokenize(token_ids, keep_special_tokens=keep_special_tokens))

    def token_pieces(self, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """The bytes that each token adds within a text; a token may be a part of a character."""
        return self._thread.run(self._client.token_pieces(token_ids))

    def pin_prefix(
        self,
        name: str,
        prefix: str | Sequence[int] | Chat | Messages,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        timeout_s: float = PIN_TIMEOUT_S,
    ) -> PinnedPrefix:
        """Computes a prefix, given as text, token ids or messages, and keeps it; returns once a worker has it."""
        pinning = self._client.pin_prefix(name, prefix, tenant=tenant, cache_salt=cache_salt, timeout_s=timeout_s)
        return self._thread.run(pinning)

    def unpin_prefix(self, name: str, *, tenant: str | None = None) -> None:
        """Lets a prefix be evicted again. Raises NotFoundError if the tenant has no such pin."""
        self._thread.run(self._client.unpin_prefix(name, tenant=tenant))

    def list_prefixes(self, *, tenant: str | None = None) -> tuple[PinnedPrefix, ...]:
        """The pinned prefixes of one tenant, by name."""
        return self._thread.run(self._client.list_prefixes(tenant=tenant))

    def model(self) -> Model:
        """The model being served."""
        return self._thread.run(self._client.model())

    def stats(self) -> Stats:
        """Snapshot of running and waiting requests and of the use of the KV memory."""
        return self._thread.run(self._client.stats())

    def shards(self) -> tuple[Shard, ...]:
        """The shards of the deployment; see `AsyncClient.shards`."""
        return self._thread.run(self._client.shards())

    def set_shards(self, num_shards: int) -> int:
        """Changes the number of shards; see `AsyncClient.set_shards`."""
        return self._thread.run(self._client.set_shards(num_shards))

    def drain_worker(self, worker_id: str, *, undo: bool = False) -> int:
        """Takes a worker out of service, or back into it; see `AsyncClient.drain_worker`."""
        return self._thread.run(self._client.drain_worker(worker_id, undo=undo))

    def health(self, service: str = INFERENCE_SERVICE) -> Health:
        """Health of the service. Raises UnavailableError if nothing answers."""
        return self._thread.run(self._client.health(service))

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Waits until the server can generate. Raises UnavailableError after `timeout_s`."""
        self._thread.run(self._client.wait_ready(timeout_s))

    def close(self) -> None:
        """Detaches from every open request; its on_disconnect decides whether it goes on."""
        self._finalizer.detach()
        self._thread.end(self._client.close())
        self._thread.join()

    def __reduce__(self) -> NoReturn:
        refuse_copy(self, "make one where it is needed, in each process")

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, open_stream: Callable[[], CompletionStream]) -> Stream:
        """Opens a stream in the loop's thread, where it belongs."""

        async def open_there() -> CompletionStream:
            return open_stream()

        return Stream(self, self._thread, self._thread.run(open_there()))


_open_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _close_unwaited(client: AsyncClient, thread: LoopThread) -> None:
    """Runs when an unclosed client is garbage-collected, which may be in its own thread."""
    thread.end(client.close())


@atexit.register
def _close_all() -> None:
    for client in list(_open_clients):
        client.close()
