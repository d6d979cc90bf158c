"""Link to a cluster of Redis or Valkey: each command goes to the node that has its keys, wherever that is by now.

Does for a cluster what RedisLink does for one server, by one RedisLink for each node. Knows slots and redirections,
and nothing of what the commands do.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError, TryAgainError

from common.waits import end_tasks
from quire.store_url import ClusterUrl, NodeAddress
from scheduler_svc.journal.redis_link import Packed, RedisLink, pack, refusing, replies_or_refusal
from scheduler_svc.journal.slot_map import SlotMap, SlotNodes, address_of
from scheduler_svc.journal.store import StoreConfigurationError, StoreUnavailableError

_MOST_HOPS = 16  # of one call
_TRY_AGAIN_S = 0.02  # while keys that belong together are on two nodes
_REDIRECTIONS = (AskError, ClusterDownError, TryAgainError)  # MovedError is an AskError
_ASKING = pack("ASKING")
_SLOTS = pack("CLUSTER", "SLOTS")
_MYID = pack("CLUSTER", "MYID")
_NO_HOST = (None, b"", b"?")  # of a node that does not know its own, or is not to tell it

Batch = Sequence[Packed]
Answer = list[Any] | StoreUnavailableError


class ClusterLink:
    """Commands whose keys have one of a few hash tags, in one slot each.

    A node that refuses a command because its keys are elsewhere has not done it, so the command is sent there. After
    a node has failed, others are asked in turn who has its slots now. The map is this link's own: it changes only
    while one of its calls is under way.
    """

    def __init__(
        self, url: str, keys: Sequence[str], *, timeout_s: float, repeatable: bool, reports_moves: bool = False
    ) -> None:
        """Take the addresses.

        Args:
            url: redis+cluster:// or rediss+cluster://.
            keys: one key of each slot.
            timeout_s: of each node that is asked.
            repeatable: a command whose node failed is sent once more.
            reports_moves: a call whose slot is at another node now fails, and the next one goes there. For who writes
                in order: the other node may lack what this one had acknowledged.

        Raises ValueError if the URL is malformed, with nothing of it in the message.
        """
        self._url = ClusterUrl.parse(url)
        self._slots = [key_slot(key.encode()) for key in keys]
        self._map = SlotMap(self._slots, self._url.seeds)
        self._timeout_s = timeout_s
        self._attempts = 2 if repeatable else 1
        self._reports_moves = reports_moves
        self._links: dict[NodeAddress, RedisLink] = {}

    async def call(self, command: Packed, *, answer_bytes: int = 0) -> Any:
        """Sends one command and returns its reply, which may have so many bytes."""
        return (await self.call_many([command], answer_bytes=answer_bytes))[0]

    async def call_many(self, commands: Batch, *, then: Batch = (), answer_bytes: int = 0) -> list[Any]:
        """Sends commands of the first slot, and `then` right behind them on the same connection.

        Raises the first refusal after reading every reply; StoreUnavailableError, too, if the commands are done on two
        nodes, so that `then` would concern one of them alone.
        """
        for attempt in range(self._attempts):
            try:
                replies = await self._call_owner(commands, then, answer_bytes)
                break
            except StoreUnavailableError as error:
                if attempt + 1 == self._attempts or isinstance(error, StoreConfigurationError):
                    raise
        return refusing(replies)

    async def call_each(self, batches: Sequence[Batch]) -> list[Answer]:
        """Sends a batch for each slot, those of one node together, all nodes at once.

        Returns the replies of each batch, or why it has none: a node that fails concerns its own slots alone.
        """
        answers: dict[int, Answer] = {number: [] for number, batch in enumerate(batches) if not batch}
        asked = [number for number, batch in enumerate(batches) if batch]
        known = [number for number in asked if self._map.owner(self._slots[number]) is not None]
        unknown = [number for number in asked if self._map.owner(self._slots[number]) is None]
        await asyncio.gather(self._call_nodes(known, batches, answers), self._find_nodes(unknown, batches, answers))
        return [answers[number] for number in range(len(batches))]

    async def call_nodes(self, commands: Batch) -> dict[str, Answer]:
        """Sends commands without keys to the primary and the replicas of the first slot; answers by address."""
        if self._map.owner(self._slots[0]) is None:
            await self._learn()
        nodes = self._map.nodes_of(self._slots[0])
        answers = await asyncio.gather(*(self._answer_of(node, commands) for node in nodes))
        await self._close_unused()
        return {str(node): answer for node, answer in zip(nodes, answers, strict=True)}

    async def confirm_owner(self) -> None:
        """Return if most other nodes, and all that answer till then, say that the first slot is where we take it to be.

        A node that was frozen or cut off does not know yet that its replica leads. Nobody needs to confirm the only
        primary of a cluster, since no replica of it is elected. Raises StoreUnavailableError.
        """
        slot = self._slots[0]
        owner = self._owner(slot)
        others = [node for node in self._map.known() if node != owner]
        asking = {asyncio.create_task(self._ask(node, [_SLOTS, _MYID])): node for node in others}
        num_others, waiting, said = len(others), set(asking), list[NodeAddress | None]()
        while waiting and len(said) <= num_others // 2:  # one that is frozen is not waited for
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in [each for each in done if each.exception() is None]:
                owners = _owners_in(task.result(), slot, asking[task])
                if owners == [owner] and _is_of_itself(task.result(), slot):
                    num_others -= 1  # it is the owner, under another name
                else:
                    said += owners
        await end_tasks(*waiting)
        await self._close_unused()
        is_alone = not num_others or self._map.has_one_primary
        if any(each != owner for each in said) or not (said or is_alone):
            self._map.record_failure(owner)
            raise StoreUnavailableError(f"{owner}: other nodes do not say that it has slot {slot}")

    async def close(self) -> None:
        """Drops every connection; a later command connects again."""
        for link in self._links.values():
            await link.close()

    async def _call_owner(self, commands: Batch, then: Batch, answer_bytes: int) -> list[Any]:
        """Replies, refusals among them. Raises StoreUnavailableError."""
        slot = self._slots[0]
        if self._map.owner(slot) is None:
            await self._learn()
        node = self._owner(slot)
        replies = await self._ask(node, [*commands, *then], answer_bytes)
        if any(isinstance(reply, _REDIRECTIONS) for reply in replies):
            return await self._redirect(slot, node, commands, then, replies)
        return replies

    async def _find_nodes(self, numbers: Sequence[int], batches: Sequence[Batch], answers: dict[int, Answer]) -> None:
        """Ask for the nodes of these batches, and send them."""
        if not numbers:
            return
        try:
            await self._learn()
        except StoreUnavailableError as error:
            answers.update(dict.fromkeys(numbers, error))
        else:
            await self._call_nodes(numbers, batches, answers)

    async def _call_nodes(self, numbers: Sequence[int], batches: Sequence[Batch], answers: dict[int, Answer]) -> None:
        """Send the batches of these numbers to the nodes of their slots."""
        numbers_of: dict[NodeAddress, list[int]] = defaultdict(list)
        for number in numbers:
            try:
                numbers_of[self._owner(self._slots[number])].append(number)
            except StoreUnavailableError as error:
                answers[number] = error
        await asyncio.gather(*(self._call_node(node, of, batches, answers) for node, of in numbers_of.items()))

    async def _call_node(
        self, node: NodeAddress, numbers: Sequence[int], batches: Sequence[Batch], answers: dict[int, Answer]
    ) -> None:
        try:
            replies = iter(await self._ask(node, [command for number in numbers for command in batches[number]]))
        except StoreUnavailableError as error:
            answers.update(dict.fromkeys(numbers, error))
            return
        for number in numbers:
            own = [next(replies) for _ in batches[number]]
            try:
                own = await self._redirect(self._slots[number], node, batches[number], (), own)
            except StoreUnavailableError as error:
                answers[number] = error
            else:
                answers[number] = replies_or_refusal(own)

    async def _redirect(
        self, slot: int, node: NodeAddress, commands: Batch, then: Batch, replies: list[Any]
    ) -> list[Any]:
        """Send what was refused to where it belongs, until nothing is. Raises StoreUnavailableError."""
        replies = list(replies)
        for _ in range(_MOST_HOPS):
            refused = [i for i in range(len(commands)) if isinstance(replies[i], _REDIRECTIONS)]
            if not refused:
                return replies
            if then and len(refused) < len(commands):
                raise StoreUnavailableError(f"{node}: slot {slot} is being moved to another node")
            reason = replies[refused[0]]
            alike = [i for i in refused if (type(replies[i]), str(replies[i])) == (type(reason), str(reason))]
            prefix, node = await self._next_node(slot, node, reason)
            sent = [part for i in alike for part in (*prefix, commands[i])]
            more = await self._ask(node, [*sent, *then])
            for position, i in enumerate(alike):
                replies[i] = more[(position + 1) * (len(prefix) + 1) - 1]
            replies[len(commands) :] = more[len(sent) :]
        raise StoreUnavailableError(f"{node}: the keys of slot {slot} are not at one node now: {reason}")

    async def _next_node(
        self, slot: int, node: NodeAddress, reason: ResponseError
    ) -> tuple[tuple[Packed, ...], NodeAddress]:
        """Node to send to after a redirection, and what to send before each command."""
        if isinstance(reason, MovedError):
            target = address_of(reason.host, reason.port, node)
            self._map.record_move(slot, target)
            await self._close_unused()
            if self._reports_moves:
                raise StoreUnavailableError(f"{node}: slot {slot} was moved to {target}")
            return (), target
        if isinstance(reason, AskError):
            return (_ASKING,), address_of(reason.host, reason.port, node)
        if isinstance(reason, TryAgainError):
            await asyncio.sleep(_TRY_AGAIN_S)
            return (), node
        self._map.record_failure(node)
        raise StoreUnavailableError(f"{node}: the cluster is down: {reason}")

    async def _learn(self) -> None:
        """Ask a node which node has which slot. Raises StoreUnavailableError."""
        node = self._map.next_to_ask()
        (reply,) = await self._ask(node, [_SLOTS])
        if isinstance(reply, ResponseError):
            if "cluster support disabled" in str(reply):
                raise StoreConfigurationError(f"{node} is no cluster: write redis:// instead of redis+cluster://")
            refusing([reply])
        self._map.learn(SlotNodes.parse(item, node) for item in reply)
        await self._close_unused()

    def _owner(self, slot: int) -> NodeAddress:
        owner = self._map.owner(slot)
        if owner is None:
            raise StoreUnavailableError(f"no node of the cluster has slot {slot}")
        return owner

    async def _ask(self, node: NodeAddress, commands: Batch, answer_bytes: int = 0) -> list[Any]:
        """Replies of a node, refusals among them. Raises StoreUnavailableError, which names the node."""
        link = self._links.get(node)
        if link is None:
            link = self._links[node] = self._link_to(node)
        try:
            return await link.exchange(commands, answer_bytes=answer_bytes)
        except StoreUnavailableError as error:
            self._map.record_failure(node)
            raise type(error)(f"{node}: {error.message}") from error

    def _link_to(self, node: NodeAddress) -> RedisLink:
        try:
            return RedisLink(
                self._url.of(node), timeout_s=self._timeout_s, repeatable=False, reports_moves=self._reports_moves
            )
        except ValueError as error:  # a file of the URL is not there: at the start, or while it is being replaced
            raise StoreConfigurationError(f"{node}: {error}") from error

    async def _answer_of(self, node: NodeAddress, commands: Batch) -> Answer:
        """Replies of a node, or why it has none."""
        try:
            return replies_or_refusal(await self._ask(node, commands))
        except StoreUnavailableError as error:
            return error

    async def _close_unused(self) -> None:
        """Drop connections to nodes that have none of our slots, unless another call waits there."""
        unused: Iterable[NodeAddress] = [
            node for node, link in self._links.items() if not link.is_busy and not self._map.owns_any(node)
        ]
        for node in unused:
            await self._links.pop(node).close()


def _owners_in(replies: list[Any], slot: int, told_by: NodeAddress) -> list[NodeAddress | None]:
    """Node that has a slot by these replies, None being nobody; nothing from a node that has it and tells no host."""
    if isinstance(replies[0], ResponseError):
        return []
    found = _range_with(replies, slot)
    if found is not None and found[2][0] in _NO_HOST and _is_of_itself(replies, slot):
        return []  # the address by which it is known here may be another one
    return [SlotNodes.parse(found, told_by).primary if found is not None else None]


def _is_of_itself(replies: list[Any], slot: int) -> bool:
    """True if a node says that it has a slot itself."""
    found = _range_with(replies, slot)
    return found is not None and found[2][2] == replies[1]


def _range_with(replies: list[Any], slot: int) -> Any:
    return next((item for item in replies[0] if int(item[0]) <= slot <= int(item[1])), None)
