"""Link to one scripted server: whose reply is whose, what a refusal means, how long an answer is waited for."""

import asyncio
import queue
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
import uvloop

from scheduler_svc.journal import redis_link
from scheduler_svc.journal.keys import Keys
from scheduler_svc.journal.redis_leases import RedisLeases, RedisShardReader
from scheduler_svc.journal.redis_link import RedisLink, pack
from scheduler_svc.journal.redis_plan import RedisShardPlan
from scheduler_svc.journal.redis_tail import RedisTail
from scheduler_svc.journal.store import StaleEntryError, StoreConfigurationError, StoreUnavailableError
from tests.patience import patient
from tests.scheduler.journal_setup import until
from tests.scheduler.scripted_cluster import CUT, ScriptedNode, get, scripted_nodes
from tests.valkey import ValkeyProcess

PING = pack("PING")
KEYS = Keys.of("default")
LIMIT_S = patient(20.0)
TENTH_BYTES = (8 << 20) // 10  # for which a call has a tenth of a second more


@asynccontextmanager
async def link_and_server(
    *, repeatable: bool = False, reports_moves: bool = False, timeout_s: float | None = None, database: str = ""
) -> AsyncIterator[tuple[RedisLink, ScriptedNode]]:
    async with scripted_nodes(1) as (server,):
        limit_s = patient(20.0) if timeout_s is None else timeout_s
        url = f"redis://{server.address}{database}"
        link = RedisLink(url, timeout_s=limit_s, repeatable=repeatable, reports_moves=reports_moves)
        try:
            yield link, server
        finally:
            await link.close()


async def test_each_caller_gets_its_own_replies_in_order() -> None:
    async with link_and_server() as (link, server):
        calls = [link.call_many(get(f"{i}", f"{i}'"), then=[PING]) for i in range(9)]
        assert await asyncio.gather(*calls) == [[b"a:%d" % i, b"a:%d'" % i, b"a:PING"] for i in range(9)]
        assert await link.call(pack("GET", "x")) == b"a:x"
        assert server.num_open == 1


@pytest.mark.parametrize(
    ("refusal", "kind", "says"),
    [
        ("ERR The ID specified in XADD is equal or smaller than", StaleEntryError, "equal or smaller"),
        ("MOVED 7 10.0.0.1:7000", StoreConfigurationError, r"write redis\+cluster:// instead of redis://"),
        ("NOPERM no permission", StoreConfigurationError, "no permission"),
        ("OOM command not allowed", StoreUnavailableError, r"it is full .* raise maxmemory"),
        ("READONLY no writes script: on @user_script:5.", StoreUnavailableError, "give the address of the primary"),
        ("NOREPLICAS Not enough", StoreUnavailableError, "fewer replicas than its min-replicas-to-write"),
        (
            "WRONGTYPE Operation script: on @user_script:5.",
            StoreUnavailableError,
            r"did not write \(WRONGTYPE Operation\)",
        ),
        ("MISCONF no disk script: on @user_script:5.", StoreUnavailableError, "^MISCONF no disk$"),
    ],
)
async def test_a_refusal_is_raised_once_every_reply_was_read(refusal: str, kind: type[Exception], says: str) -> None:
    async with link_and_server() as (link, server):
        server.refusals["x"] = [refusal] * 3
        with pytest.raises(kind, match=says) as refused:
            await link.call_many(get("x", "y"))
        assert type(refused.value) is kind
        assert await link.call(pack("GET", "z")) == b"a:z"
        if kind is not StaleEntryError:
            refused_one, other, none = await link.call_each([get("y", "x"), get("y"), []])
            assert (type(refused_one), other, none) == (kind, [b"a:y"], [])
            assert {name: type(answer) for name, answer in (await link.call_nodes(get("x"))).items()} == {"": kind}
        assert await link.call_nodes(get("y")) == {"": [b"a:y"]}


@pytest.mark.parametrize(
    ("last_word", "refusal", "says"),
    [
        ("HELLO", "WRONGPASS invalid username-password pair", "invalid username-password pair"),
        (
            "HELLO",
            "NOAUTH HELLO must be called with the client already authenticated",
            "write :PASSWORD@ before the host",
        ),
        ("7", "ERR DB index is out of range", "DB index is out of range"),
    ],
)
async def test_a_server_that_refuses_us_is_not_asked_again(last_word: str, refusal: str, says: str) -> None:
    async with link_and_server(repeatable=True, database="/7") as (link, server):
        server.refusals[last_word] = [refusal]
        with pytest.raises(StoreConfigurationError, match=says):
            await link.call(PING)
        assert server.refusals[last_word] == []
        server.answers["SELECT"] = b"OK"
        assert await link.call(PING) == b"a:PING"


@pytest.mark.parametrize(
    "said", ["unknown command 'HELLO', with args beginning with: '3' 'AUTH' 'me' 'secret' ", "NOPROTO unsupported"]
)
async def test_a_server_that_speaks_an_older_protocol_is_told_what_is_needed_without_its_password(said: str) -> None:
    async with scripted_nodes(1) as (server,):
        link = RedisLink(f"redis://me:secret@{server.address}", timeout_s=LIMIT_S, repeatable=True)
        server.refusals["HELLO"] = [f"ERR {said}" if said.startswith("unknown") else said]
        with pytest.raises(StoreConfigurationError, match=r"Redis 7\.0 or Valkey 8, or later") as refused:
            await link.call(PING)
        assert "secret" not in str(refused.value)
        await link.close()


async def test_an_unknown_command_is_named_without_what_was_sent() -> None:
    async with link_and_server() as (link, server):
        server.refusals["x"] = ["ERR unknown command 'XADD', with args beginning with: 'e' 'a prompt' "]
        with pytest.raises(StoreConfigurationError, match="it does not know the command XADD; ") as refused:
            await link.call(pack("XADD", "x"))
        assert "prompt" not in str(refused.value)


async def test_no_command_follows_a_greeting_that_was_refused(valkey: ValkeyProcess) -> None:
    """By a socket the library leaves that connection open: at database 0, whichever the URL names."""
    link = RedisLink(f"{valkey.url}?db=3", timeout_s=LIMIT_S, repeatable=False)
    valkey.command("ACL", "SETUSER", "default", "-select")
    for _ in range(2):
        with pytest.raises(StoreConfigurationError, match="'select'"):
            await link.call(pack("SET", "key", "value"))
    valkey.command("ACL", "SETUSER", "default", "+select")
    await link.call(pack("SET", "key", "value"))
    await link.close()
    assert b"db3:keys=1" in valkey.command("INFO", "keyspace")
    assert b"db0:" not in valkey.command("INFO", "keyspace")


async def test_long_commands_and_answers_have_longer() -> None:
    async with link_and_server(timeout_s=0.05) as (link, server):
        server.may_answer.clear()
        with pytest.raises(StoreUnavailableError, match=r"no answer within 0\.05 s"):
            await link.call(PING)
        with pytest.raises(StoreUnavailableError, match=r"no answer within 0\.25 s"):
            await link.call(pack("GET", bytes(TENTH_BYTES)), answer_bytes=TENTH_BYTES)
        with pytest.raises(StoreUnavailableError, match=r"no answer within 0\.15 s"):
            await link.call_many([PING], answer_bytes=TENTH_BYTES)


def answer_pings(listening: socket.socket, num_answered: "queue.SimpleQueue[int]") -> None:
    """Answer one connection, from a thread of its own; put the number of its pings so far whenever it was sent."""
    replies = {b"HELLO": b"%1\r\n$5\r\nproto\r\n:3\r\n", b"SETINFO": b"+OK\r\n", b"PING": b"+PONG\r\n"}
    num_pings = 0
    connection, _ = listening.accept()
    with connection:
        while said := connection.recv(1 << 16):
            words = re.findall(b"HELLO|SETINFO|PING", said)
            connection.sendall(b"".join(replies[each] for each in words))
            num_pings += words.count(b"PING")
            num_answered.put(num_pings)


@pytest.mark.parametrize("new_loop", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_a_reply_that_came_while_our_own_loop_was_blocked_is_taken(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """The overdue limit would come before the task that reads, and the store be blamed for our own slowness."""

    async def ask(address: str, num_answered: "queue.SimpleQueue[int]") -> None:
        limit_s = patient(0.4)
        link = RedisLink(f"redis://{address}", timeout_s=limit_s, repeatable=False)
        assert await link.call(PING) == b"PONG"
        asking = asyncio.create_task(link.call(PING))
        await asyncio.sleep(0)  # it is sent
        while num_answered.get(timeout=patient(20)) < 2:
            pass
        time.sleep(1.2 * limit_s)  # noqa: ASYNC251 - our own loop stands still
        assert await asking == b"PONG"
        await link.close()

    num_answered: queue.SimpleQueue[int] = queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as threads:
        answering = threads.submit(answer_pings, listening, num_answered)
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(ask(f"127.0.0.1:{listening.getsockname()[1]}", num_answered))
        answering.result(patient(20))


async def test_a_late_reply_is_nobodys() -> None:
    async with link_and_server() as (link, server):
        await link.call(PING)
        server.may_answer.clear()
        impatient = asyncio.create_task(link.call(pack("GET", "x")))
        waiting = asyncio.create_task(link.call(pack("GET", "y")))
        await until(lambda: server.commands == ["PING", "GET x"])
        assert link.is_busy
        impatient.cancel()
        await asyncio.wait([impatient])
        assert link.is_busy  # with the one that waits
        server.may_answer.set()
        assert await waiting == b"a:y"
        assert not link.is_busy


@pytest.mark.parametrize(("repeatable", "num_cuts", "is_done"), [(False, 1, False), (True, 1, True), (True, 2, False)])
async def test_a_command_whose_connection_is_cut_is_sent_once_more_at_most(
    repeatable: bool, num_cuts: int, is_done: bool
) -> None:
    async with link_and_server(repeatable=repeatable) as (link, server):
        server.refusals["x"] = [CUT] * num_cuts
        if is_done:
            assert await link.call(pack("GET", "x")) == b"a:x"
        else:
            with pytest.raises(StoreUnavailableError):
                await link.call(pack("GET", "x"))
        assert server.commands == ["GET x"] * (2 if repeatable else 1)
        assert not link.is_busy
        server.commands.clear()
        assert await link.call(pack("GET", "y")) == b"a:y"
        assert server.commands == ["GET y"]


def run_as_services_do(main: Coroutine[None, None, None]) -> None:
    """On the event loop of the services, whose transports refuse to write once they are closed."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


async def reset_while_idle(link: RedisLink, server: ScriptedNode) -> None:
    """Return once the link's transport knows."""
    assert await link.call(PING) == b"a:PING"
    server.reset()
    await until(lambda: link._connection._writer is None or link._connection._writer.is_closing())


@pytest.mark.parametrize("repeatable", [False, True])
def test_a_connection_that_was_reset_while_idle_fails_no_call(repeatable: bool) -> None:
    async def ask() -> None:
        async with link_and_server(repeatable=repeatable) as (link, server):
            await reset_while_idle(link, server)
            assert await link.call(pack("GET", "x")) == b"a:x"
            assert server.commands == ["PING", "GET x"]

    run_as_services_do(ask())


def test_who_writes_in_order_is_told_that_its_connection_was_reset() -> None:
    """Another server may answer there by now, which lacks what this one had acknowledged."""

    async def ask() -> None:
        async with link_and_server(reports_moves=True) as (link, server):
            await reset_while_idle(link, server)
            with pytest.raises(StoreUnavailableError):
                await link.call(pack("GET", "x"))
            assert server.commands == ["PING"]
            assert await link.call(pack("GET", "y")) == b"a:y"

    run_as_services_do(ask())


async def test_who_writes_in_order_is_told_that_another_link_has_found_a_replica_there() -> None:
    async with link_and_server(reports_moves=True) as (link, server):
        assert await link.call(PING) == b"a:PING"
        link._address.left_s = time.monotonic()
        with pytest.raises(StoreUnavailableError, match="another server may answer there by now"):
            await link.call(pack("GET", "x"))
        assert server.commands == ["PING"]
        assert await link.call(pack("GET", "y")) == b"a:y"


def test_a_transport_that_is_closed_while_it_is_written_to_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        async with link_and_server() as (link, server):
            await reset_while_idle(link, server)
            monkeypatch.setattr(redis_link, "_is_closing", lambda connection: False)
            with pytest.raises(StoreUnavailableError):
                await link.call(PING)
            assert await link.call(PING) == b"a:PING"

    run_as_services_do(ask())


ASKING: list[tuple[str, Callable[[str], Awaitable[object]]]] = [  # the last word of the first command
    (KEYS.lease, lambda url: RedisLeases(url, timeout_s=LIMIT_S).read()),
    (KEYS.lease, lambda url: RedisShardReader(url, deployments=["default"], timeout_s=LIMIT_S).read_shards(1)),
    (KEYS.shards, lambda url: RedisShardPlan(url, deployment="default").read()),
    ("1", lambda url: RedisTail(url).first()),
]


@pytest.mark.parametrize(("last_word", "ask"), ASKING, ids=["lease", "shards", "plan", "tail"])
async def test_what_is_asked_of_leases_plans_and_tails_is_sent_once(
    last_word: str, ask: Callable[[str], Awaitable[object]]
) -> None:
    """Callers know when to ask again."""
    async with scripted_nodes(1) as (server,):
        server.refusals[last_word] = [CUT]
        with pytest.raises(StoreUnavailableError):
            await ask(f"redis://{server.address}")
        assert len(server.commands) < 2  # a machine that is busy for the time of a lease sends none


async def test_a_link_that_was_closed_connects_again() -> None:
    async with link_and_server() as (link, server):
        await link.call(PING)
        await link.close()
        await until(lambda: server.num_open == 0)
        assert await link.call(PING) == b"a:PING"


async def test_closing_does_not_wait_for_a_server_that_does_not_read() -> None:
    async with link_and_server() as (link, server):
        await link.call(PING)
        server.may_answer.clear()
        sending = asyncio.create_task(link.call_many([*get("x"), pack("GET", bytes(32 << 20))]))
        await until(lambda: server.commands == ["PING", "GET x"])
        async with asyncio.timeout(patient(10.0)):
            await link.close()
        sending.cancel()
        await asyncio.wait([sending])


async def test_one_server_owns_every_slot() -> None:
    async with link_and_server() as (link, server):
        await link.confirm_owner()
        assert server.commands == []
