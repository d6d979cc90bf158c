"""Nodes of a cluster inside the test's process: each listens on a port of its own and answers as the test says."""

import asyncio
import os
import socket
import ssl
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from redis.crc import key_slot

from scheduler_svc.journal.cluster_link import ClusterLink
from scheduler_svc.journal.redis_link import pack
from tests.patience import patient

K1, K2, K3 = "{x}1", "{x}2", "{x}3"  # keys of one slot
OTHER, THIRD = "{y}1", "{z}1"
SLOT, OTHER_SLOT, THIRD_SLOT = (key_slot(key.encode()) for key in (K1, OTHER, THIRD))
PING = pack("PING")

SlotOwners = dict[int, Sequence["ScriptedNode"]]  # by slot: the primary, then its replicas


CUT = ""  # instead of a refusal: the connection is cut


class Refusal(Exception):
    """Reply of a node that refuses a command; its words are those of the protocol."""


class ScriptedNode:
    """Answers a read of a key with its own name and the key, if the key is not refused. Knows what it was sent."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = ""
        self.says: SlotOwners | Refusal = {}
        self.own_id = name  # what it takes for its id
        self.refusals: dict[str, list[str]] = defaultdict(list)  # by key: of the next commands, in order
        self.answers: dict[str, Any] = {}  # by command or its first word, instead of name and key
        self.asked_first: set[str] = set()  # keys that it has only for who says ASKING
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.commands: list[str] = []  # words that were sent, without those of connecting
        self.num_open = 0  # connections
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Die: connections are cut, and new ones refused."""
        self.may_answer.set()
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.close()
        await asyncio.sleep(0)

    def reset(self) -> None:
        """Reset every connection, as a balancer does with one that was idle for long."""
        for writer in self._writers:
            with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as each:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def reads(self) -> list[str]:
        """Commands that were sent, without questions for slots."""
        return [each for each in self.commands if not each.startswith("CLUSTER")]

    def num_asked_for_slots(self) -> int:
        """Number of questions for the slots."""
        return self.commands.count("CLUSTER SLOTS")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.num_open += 1
        says_asking = False
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while not reader.at_eof():
                words = await _read_command(reader)
                if words[0] not in ("HELLO", "CLIENT"):
                    self.commands.append(" ".join(words))
                await self.may_answer.wait()
                reply = self._reply(words, says_asking=says_asking)
                says_asking = words == ["ASKING"]
                if isinstance(reply, Refusal) and str(reply) == CUT:
                    break
                writer.write(_encoded(reply))
                await writer.drain()
        self.num_open -= 1
        self._writers.discard(writer)
        writer.close()

    def _reply(self, words: list[str], *, says_asking: bool) -> Any:
        if words[0] == "HELLO":
            if self.refusals["HELLO"]:
                return Refusal(self.refusals["HELLO"].pop(0))
            return {"proto": 3}
        if words[0] == "CLIENT":
            return b"OK"
        if words == ["CLUSTER", "SLOTS"]:
            return self._slots()
        if words == ["CLUSTER", "MYID"]:
            return self.own_id.encode()
        key = words[-1]
        if self.refusals[key]:
            return Refusal(self.refusals[key].pop(0))
        if key in self.asked_first and not says_asking:
            return Refusal(f"MOVED 1 {self.address}")  # for ever
        by_word = self.answers.get(words[0], f"{self.name}:{key}".encode())
        return self.answers.get(" ".join(words), by_word)

    def _slots(self) -> Any:
        if isinstance(self.says, Refusal):
            return self.says
        return [[*self._range_with(slot), *(each.told() for each in nodes)] for slot, nodes in self.says.items()]

    def _range_with(self, slot: int) -> tuple[int, int]:
        """Range of which the slot is the first or the last one."""
        return (slot, slot + 5) if self.name in "ac" else (slot - 5, slot)

    def told(self) -> list[Any]:
        """Address and id as nodes tell them."""
        host, _, port = self.address.rpartition(":")
        return [host.encode(), int(port), self.name.encode()]


@asynccontextmanager
async def scripted_nodes(number: int) -> AsyncIterator[list[ScriptedNode]]:
    """Nodes named a, b, c, …"""
    async with AsyncExitStack() as stack:
        nodes = [ScriptedNode("abcdefg"[index]) for index in range(number)]
        for node in nodes:
            await node.start()
            stack.push_async_callback(node.stop)
        yield nodes


def get(*keys: str) -> list[bytes]:
    return [pack("GET", key) for key in keys]


def owned(nodes: Sequence[ScriptedNode], owners: SlotOwners) -> None:
    """Have all nodes say the same of the slots."""
    for node in nodes:
        node.says = owners


@asynccontextmanager
async def link_to(
    *seeds: ScriptedNode,
    keys: Sequence[str] = (K1, OTHER, THIRD),
    repeatable: bool = False,
    reports_moves: bool = False,
    timeout_s: float = 20.0,
) -> AsyncIterator[ClusterLink]:
    url = "redis+cluster://" + ",".join(node.address for node in seeds)
    link = ClusterLink(url, keys, timeout_s=patient(timeout_s), repeatable=repeatable, reports_moves=reports_moves)
    try:
        yield link
    finally:
        await link.close()


async def _read_command(reader: asyncio.StreamReader) -> list[str]:
    words = []
    for _ in range(int((await reader.readuntil(b"\r\n"))[1:])):
        length = int((await reader.readuntil(b"\r\n"))[1:])
        words.append((await reader.readexactly(length + 2))[:-2].decode())
    return words


def _encoded(reply: Any) -> bytes:
    """Reply in the form of the protocol."""
    if isinstance(reply, Refusal):
        return b"-%b\r\n" % str(reply).encode()
    if reply is None:
        return b"_\r\n"
    if isinstance(reply, float):
        return b",%d\r\n" % reply
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if isinstance(reply, dict):
        pairs = [part for key, value in reply.items() for part in (key.encode(), value)]
        return b"%%%d\r\n" % len(reply) + b"".join(map(_encoded, pairs))
    return b"*%d\r\n" % len(reply) + b"".join(map(_encoded, reply))
