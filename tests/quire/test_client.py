"""The synchronous client: the same requests, from threads."""

import asyncio
import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import quire
from tests.patience import patient
from tests.quire.scripted_run import Script
from tests.quire.scripted_server import ScriptedServer


async def test_every_call_works_without_asyncio(server: ScriptedServer) -> None:
    def use() -> None:
        with quire.Client(server.address) as client:
            client.wait_ready(5)
            completion = client.generate("hello", max_tokens=8)
            assert completion.text == " 0 1 2 3 4 5 6 7"
            assert client.chat([{"role": "user", "content": "Hi"}]).token_ids == tuple(range(8))
            assert client.get(completion.request_id).state is quire.RequestState.FINISHED
            assert client.cancel(completion.request_id) is quire.RequestState.FINISHED
            assert client.tokenize("a b").tokens == ("a", "b")
            assert client.detokenize([1]) == " 1"
            assert client.model().name == "scripted"
            assert client.stats().num_running == 2
            assert client.health() is quire.Health.SERVING
            assert client.attach(completion.request_id, 6).completion().text == " 6 7"

    await asyncio.to_thread(use)


async def test_a_stream_is_an_iterator(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=5, tokens_per_chunk=1)

    def use() -> list[str]:
        with quire.Client(server.address) as client, client.stream("hello") as stream:
            assert stream.accepted().request_id == stream.request_id
            return [chunk.text for chunk in stream]

    assert await asyncio.to_thread(use) == [" 0", " 1", " 2", " 3", " 4"]


async def test_leaving_a_stream_cancels_its_request(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=5, released=1)
    with quire.Client(server.address) as client:

        def use() -> None:
            with client.stream_chat([{"role": "user", "content": "Hi"}], request_id="left") as stream:
                next(stream)

        await asyncio.to_thread(use)
        await server.until(lambda: server.count("cancel", "left") == 1)
        await asyncio.to_thread(client.close)


async def test_threads_share_one_session(server: ScriptedServer) -> None:
    def use() -> set[str]:
        with quire.Client(server.address) as client, ThreadPoolExecutor(8) as pool:
            return {each.text for each in pool.map(client.generate, [f"prompt {i}" for i in range(64)])}

    assert await asyncio.to_thread(use) == {" 0 1 2 3 4 5 6 7"}
    assert server.num_sessions == 1


async def test_errors_come_through_with_their_type(server: ScriptedServer) -> None:
    server.default = Script(refusals=[quire.FailedPreconditionError("the model has no chat template")])

    def use() -> None:
        with quire.Client(server.address) as client, pytest.raises(quire.FailedPreconditionError, match="template"):
            client.generate("hello")

    await asyncio.to_thread(use)


def client_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "quire-client"}


def test_a_closed_client_says_so_and_leaves_no_thread() -> None:
    others = client_threads()
    client = quire.Client("127.0.0.1:1")
    assert len(client_threads() - others) == 1
    client.close()
    client.close()
    assert not client_threads() - others
    with pytest.raises(RuntimeError, match="closed"):
        client.stats()


class Cyclic:
    """A user's object that holds a client, and itself: only the garbage collector finds it."""

    def __init__(self, address: str) -> None:
        self.me = self
        self.client = quire.Client(address)


async def test_a_client_that_is_collected_in_its_own_thread_ends_without_waiting(server: ScriptedServer) -> None:
    def drop() -> threading.Thread:
        others = client_threads()
        holder = Cyclic(server.address)
        holder.client.model()
        loop = holder.client._thread._loop
        (thread,) = client_threads() - others
        found = weakref.ref(holder.client)
        gc.disable()
        try:
            del holder
            assert found() is not None
            loop.call_soon_threadsafe(gc.collect)
            thread.join(patient(20))
        finally:
            gc.enable()
        assert found() is None
        return thread

    assert not (await asyncio.to_thread(drop)).is_alive()


async def test_a_stream_keeps_the_client_that_nobody_else_refers_to(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=5, tokens_per_chunk=1)

    def use() -> list[str]:
        return [chunk.text for chunk in quire.Client(server.address).stream("hello")]

    assert await asyncio.to_thread(use) == [" 0", " 1", " 2", " 3", " 4"]


async def test_calls_of_other_threads_end_with_a_word_when_the_client_is_closed(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=5, released=1)

    def use() -> None:
        client = quire.Client(server.address)
        begun = threading.Barrier(5)
        endings: list[BaseException] = []

        def ask(number: int) -> None:
            begun.wait()
            try:
                while True:
                    client.tokenize("a b")
            except Exception as error:
                endings.append(error)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        begun.wait()
        client.tokenize("a b")
        client.close()
        for thread in threads:
            thread.join(patient(20))
            assert not thread.is_alive()
        assert [type(error) for error in endings] == [RuntimeError] * 4
        assert all("closed" in str(error) for error in endings)

    await asyncio.to_thread(use)


async def test_an_unclosed_client_is_closed_when_the_process_ends(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=9, released=1)
    program = f"""
import quire
client = quire.Client({server.address!r})
stream = client.stream("hello", request_id="left-open")
print(next(stream).text)
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), patient(20))
    assert (process.returncode, output.decode().strip()) == (0, "0")
    await server.until(lambda: server.count("detach", "left-open") == 1)


async def test_clients_that_are_closed_beside_others_leave_no_word_of_grpc(server: ScriptedServer) -> None:
    server.may_end_shards.clear()
    program = f"""
import threading
import quire
ended = threading.Event()
lasting = quire.Client({server.address!r})
def use():
    while not ended.is_set():
        lasting.tokenize("a b")
thread = threading.Thread(target=use)
thread.start()
for _ in range(20):
    with quire.Client({server.address!r}) as client:
        client.tokenize("a b")
ended.set()
thread.join()
lasting.close()
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stderr=subprocess.PIPE)
    _, errors = await asyncio.wait_for(process.communicate(), patient(60))
    assert (process.returncode, "Event loop is closed" in errors.decode()) == (0, False), errors.decode()


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ("client.tokenize('a b')", "spawn or forkserver"),
        ("client = None; quire.Client(ADDRESS).tokenize('a b'); client = quire.Client(ADDRESS)", "spawn or forkserver"),
        ("", "make one here"),
    ],
)
async def test_a_client_says_that_it_does_not_work_in_a_fork_and_goes_on_in_the_parent(
    server: ScriptedServer, before: str, told: str
) -> None:
    program = f"""
import os, signal, sys
import quire
ADDRESS = {server.address!r}
client = quire.Client(ADDRESS)
{before}
child = os.fork()
if child == 0:
    signal.alarm({round(patient(20))})  # ends it if a call hangs
    try:
        client.tokenize("a b")
    except RuntimeError as error:
        print(error, flush=True)
    sys.exit(7)  # with the handlers of an exit, which close clients
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(client.tokenize("a b").token_ids))
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), patient(60))
    said, ended = output.decode().strip().splitlines()
    assert told in said
    assert ended == "7 2"


@pytest.mark.parametrize(
    ("loading", "variable"),
    [("import quire", None), ("import quire.client", None), ("import grpc, quire", "0")],
)
async def test_forks_that_use_no_client_are_left_alone_by_grpc(
    server: ScriptedServer, loading: str, variable: str | None
) -> None:
    """Handlers of forks aborted one child in fifteen, and wrote of most others."""
    program = f"""
import os
{loading}
import quire
assert os.environ.get("GRPC_ENABLE_FORK_SUPPORT") == {variable!r}
client = quire.Client({server.address!r})
for _ in range(25):
    client.tokenize("a b")
    child = os.fork()
    if child == 0:
        os._exit(7)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended == 7, ended
"""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    if variable is not None:
        environment["GRPC_ENABLE_FORK_SUPPORT"] = variable
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stderr=subprocess.PIPE, env=environment
    )
    _, errors = await asyncio.wait_for(process.communicate(), patient(60))
    assert (process.returncode, errors.decode()) == (0, "")


async def test_a_process_that_forks_before_its_first_call_may_use_a_client_in_the_fork(server: ScriptedServer) -> None:
    program = f"""
import os
import quire
parents = quire.Client({server.address!r})
child = os.fork()
with quire.Client({server.address!r}) as client:
    assert len(client.tokenize("a b").token_ids) == 2
if child:
    assert os.waitpid(child, 0)[1] == 0
    assert len(parents.tokenize("a b").token_ids) == 2
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await asyncio.wait_for(process.wait(), patient(60)) == 0


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("buffer_tokens", 0, ValueError),
        ("buffer_tokens", 2.5, TypeError),
        ("retries", -1, ValueError),
        ("retries", True, TypeError),
        ("call_timeout_s", "5", TypeError),
        ("call_timeout_s", 0, ValueError),
        ("connect_timeout_s", float("nan"), ValueError),
        ("reconnect_timeout_s", -1, ValueError),
        ("timeout_s", 0, ValueError),
        ("timeout_s", float("inf"), ValueError),
        ("api_key", "secret\n", ValueError),  # as a file has it; gRPC sends none, and every call waited for ever
        ("api_key", "sécret", ValueError),
        ("api_key", b"secret", TypeError),
        ("tls_client_cert", "/no/such/file", ValueError),  # without its key
    ],
)
def test_an_impossible_option_is_refused_by_name(option: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=option) as caught:
        quire.AsyncClient("127.0.0.1:1", **{option: value})  # type: ignore[arg-type]
    assert "cret" not in str(caught.value)


def test_a_chunk_that_arrives_while_its_reader_is_interrupted_is_read_next() -> None:
    """An interrupted cell of a notebook may go on with its stream; a chunk of five was missing then."""
    program = """
import signal, threading
from quire.client import LoopThread, Stream

class Inner:
    chunks = ["a", "b", "c"]
    async def __anext__(self):
        if not self.chunks:
            raise StopAsyncIteration
        chunk = self.chunks.pop(0)  # from now on nobody else has it
        if chunk == "b":
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            assert interrupted.wait(20)
        return chunk

interrupted = threading.Event()
stream = Stream(None, LoopThread(), Inner())
print(next(stream))
try:
    next(stream)
except KeyboardInterrupt:
    interrupted.set()
print(*stream)
"""
    command = [sys.executable, "-c", program]
    read = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=True)
    assert read.stdout.split() == ["a", "b", "c"]


async def test_a_stream_can_be_left_after_its_client_was_closed(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=5, released=1)

    def use() -> None:
        client = quire.Client(server.address)
        with client.stream("hello", request_id="late") as stream:
            next(stream)
            client.close()

    await asyncio.to_thread(use)
    assert server.count("cancel", "late") == 0


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
async def test_a_client_or_stream_says_that_it_cannot_be_copied(
    server: ScriptedServer, duplicate: Callable[[object], object]
) -> None:
    """Most often it is an argument for a pool of processes."""

    def use() -> None:
        with quire.Client(server.address) as client:
            with pytest.raises(TypeError, match=r"^Client .*make one .*in each process"):
                duplicate(client)
            with (
                client.stream("hello") as stream,
                pytest.raises(TypeError, match=r"^Stream .*attach to its request_id"),
            ):
                duplicate(stream)
            assert client.generate("hello").text

    await asyncio.to_thread(use)
    async with quire.AsyncClient(server.address) as client:
        with pytest.raises(TypeError, match=r"^AsyncClient cannot"):
            duplicate(client)
        with pytest.raises(TypeError, match=r"^CompletionStream cannot"):
            duplicate(client.stream("hello"))


@pytest.mark.parametrize("address", [None, 7847, b"127.0.0.1:7847", ["127.0.0.1:7847"]])
def test_what_is_no_text_is_refused_as_an_address(address: object) -> None:
    for kind in (quire.Client, quire.AsyncClient):
        with pytest.raises(TypeError, match="an address is a text"):
            kind(address)  # type: ignore[arg-type]


class Reader:
    """An object that keeps a generator over a stream, and is kept by it: only the garbage collector frees it."""

    def __init__(self, client: quire.Client) -> None:
        self._client = client
        self.pieces = self._read()

    def _read(self) -> Iterator[str]:
        with self._client.stream("hello", request_id="left") as stream:
            for chunk in stream:
                yield chunk.text


async def test_a_generator_that_the_clients_own_thread_collects_is_closed_there(server: ScriptedServer) -> None:
    """Regression: closing it waited for the thread in which it was closed, and so did every later call."""
    server.default = Script(num_tokens=5, released=1)

    def use() -> quire.Health:
        client = quire.Client(server.address)
        gc.disable()
        try:
            reader = Reader(client)
            next(reader.pieces)
            del reader
            client._thread._loop.call_soon_threadsafe(gc.collect)
        finally:
            gc.enable()
        health = client.health()
        client.close()
        return health

    assert await asyncio.wait_for(asyncio.to_thread(use), patient(30)) is quire.Health.SERVING
    await server.until(lambda: server.count("cancel", "left") == 1)


async def test_a_client_can_be_closed_in_its_own_thread_and_not_called(server: ScriptedServer) -> None:
    client = quire.Client(server.address)
    refused = threading.Event()

    def use() -> None:
        with pytest.raises(RuntimeError, match="own thread"):
            client.health()
        client.close()
        refused.set()

    await asyncio.to_thread(client.health)
    client._thread._loop.call_soon_threadsafe(use)
    assert await asyncio.to_thread(refused.wait, patient(30))
    await asyncio.to_thread(client._thread.join)
