"""The store's process in a simulation: what RedisStore would find behind its connections, and all that can go wrong.

It outlives schedulers, and keeps, beside the journal, every entry that it ever took: `on_taken` is told of each.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from scheduler_svc.journal.leases import Lease
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.store import EntryId, Record, RecordLimits, StoreUnavailableError
from tests.simulation.history import History
from tests.simulation.machine_clocks import MachineClock, time_of_day
from tests.simulation.virtual_loop import Process, VirtualLoop

Mode = Literal["up", "down", "loading", "frozen", "full", "read only"]


DEAF: dict[Mode, str] = {
    "down": "connection refused",
    "loading": "LOADING Valkey is loading the dataset in memory",
}
REFUSALS: dict[Mode, str] = {
    "full": "OOM command not allowed when used memory > 'maxmemory'",
    "read only": "READONLY You can't write against a read only replica",
}


class LossyStore(MemoryStore):
    """Contents of the server: journal, epoch and records, the lease with its end, and standbys with theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.lease: tuple[Lease, float] | None = None
        self.standbys: dict[str, float] = {}

    def lose_last(self, num_entries: int) -> None:
        """Lose the last entries, as after a failover to a replica that lagged behind."""
        num_kept = max(1, len(self._ids) - num_entries)
        del self._ids[num_kept:], self._payloads[num_kept:]
        self._last = self._ids[-1]

    async def put_records_at(self, unix_ns: int, records: Sequence[Record], limits: RecordLimits) -> int:
        """Put records as RedisStore does: their accounts go by the writer's time of day."""
        with time_of_day(unix_ns):
            return await self.put_records(records, limits)

    @property
    def now_s(self) -> float:
        """The server's time of day, by which keys live."""
        return time.time()

    @property
    def num_entries(self) -> int:
        return len(self._ids)


@dataclass(slots=True, eq=False)
class Command:
    """`work` is of a MemoryStore, and never waits."""

    name: str
    work: Callable[[LossyStore], Coroutine[Any, Any, Any]]
    is_write: bool
    reply: "asyncio.Future[Any]"
    server: int  # the one that its connection is to
    taken: tuple[EntryId, bytes] | None = None  # an entry that is appended
    is_answered: bool = False


class StoreServer:
    """Takes commands as they arrive, one at a time; replies after a delay, or never."""

    def __init__(self, loop: VirtualLoop, random_: Random, history: History, clock: MachineClock) -> None:
        self.mode: Mode = "up"
        self.delay_s = (0.0001, 0.001)  # of either way
        self.lost_replies = 0.0  # probability
        self.on_taken: Callable[[EntryId, bytes], None] = lambda entry_id, payload: None
        self.on_loss: Callable[[bool, bool], None] = lambda is_last_unanswered, is_all: None
        self.on_answered: Callable[[bytes], None] = lambda payload: None
        self.server = 1  # who it is: after a failover another, to whom nobody is connected
        self.forgets = 0.0  # probability that an entry is acknowledged, and not kept: no promise survives that
        self.has_lost_data = False
        self.lost_s = 0.0  # when it last lost data
        self.flushed_s = 0.0  # when records were among it
        self.process = Process(loop, "store", clock)
        self.content = LossyStore()
        self._loop = loop
        self._random = random_
        self._history = history
        self._backlog: list[Command] = []  # that arrived while it was frozen
        self._last_append: Command | None = None  # that was done

    @property
    def now_s(self) -> float:
        """Time of the simulated world, whatever the clocks of processes show."""
        return self._loop.now_s

    def send(self, command: Command) -> None:
        """Send a command. It arrives after a delay, even if the sender is gone by then."""
        self.process.call_later(self._delay(), self._arrive, command)

    def thaw(self) -> None:
        """Execute all commands that arrived meanwhile, connection by connection, in a random order of connections."""
        self.mode = "up"
        backlog, self._backlog = self._backlog, []
        self._random.shuffle(backlog)
        for command in backlog:
            self.process.context.run(self._arrive, command)

    def flush(self) -> None:
        """Journal, epoch, lease and records are gone."""
        self._note_loss(is_all=True)
        self.flushed_s = self.lost_s
        self.content = LossyStore()

    def fail_over(self, num_entries: int) -> None:
        """The last entries are gone, and every connection breaks: what is on its way is lost with the old server."""
        if self.content.num_entries:
            self._note_loss(is_all=False)
            self.content.lose_last(num_entries)
            self.server += 1

    def hang_up(self) -> None:
        """Break every connection, as at the server's end; replies are lost, accepted commands are not."""
        self._history.count("store ends and keeps its journal" if self.content.num_entries else "store ends empty")
        self.server += 1

    def _note_loss(self, *, is_all: bool) -> None:
        last = self._last_append
        self.on_loss(last is not None and not last.is_answered, is_all)
        self.has_lost_data = True
        self.lost_s = self._loop.now_s

    def _arrive(self, command: Command) -> None:
        if self.mode == "frozen":
            self._backlog.append(command)
        elif command.server != self.server:
            self._reply(command, StoreUnavailableError("connection lost"))
        elif self.mode in DEAF:
            self._reply(command, StoreUnavailableError(DEAF[self.mode]))
        elif self.mode in REFUSALS and command.is_write:
            self._reply(command, StoreUnavailableError(REFUSALS[self.mode]))
        else:
            self._execute(command)

    def _execute(self, command: Command) -> None:
        try:
            command.work(self.content).send(None)
        except StopIteration as done:
            result = done.value
            if command.taken is not None and self._random.random() < self.forgets:
                self.content.lose_last(1)
            elif command.taken is not None:
                self._last_append = command
                self.on_taken(*command.taken)
        except Exception as error:
            result = error
        self._history.note(f"store {command.name} {type(result).__name__}")
        if self._random.random() < self.lost_replies:
            if self._random.random() < 0.5:
                self._reply(command, StoreUnavailableError("connection lost"))
            return
        self._reply(command, result)

    def _reply(self, command: Command, result: Any) -> None:
        self._loop.outside(self._delay(), self._answer, command, result)

    def _answer(self, command: Command, result: Any) -> None:
        reply = command.reply
        if reply.done():
            return
        if command.server != self.server:
            reply.set_exception(StoreUnavailableError("connection lost"))
        elif isinstance(result, Exception):
            reply.set_exception(result)
        else:
            command.is_answered = True
            if command.taken is not None:
                self.on_answered(command.taken[1])
            reply.set_result(result)

    def _delay(self) -> float:
        return self._random.uniform(*self.delay_s)
