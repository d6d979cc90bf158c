"""One run: schedulers one after another, workers, a store and clients in one loop, all drawn from one seed.

It starts what died, and knows who leads. What goes wrong is done elsewhere, and what must hold is looked at elsewhere.
"""

import asyncio
from collections.abc import Callable
from copy import copy
from random import Random

from quire.v1 import inference_pb2 as pb
from quire.v1 import worker_pb2
from scheduler_svc.journal.store import EntryId
from tests.simulation.client import Client
from tests.simulation.history import History
from tests.simulation.journal_truth import JournalTruth
from tests.simulation.load import BLOCK_SIZE, ClientPlan, Order, PinPlan, draw_load
from tests.simulation.losses import Losses
from tests.simulation.machine_clocks import Clocks
from tests.simulation.scheduler_life import SchedulerLife
from tests.simulation.scheduler_options import GRACE_S, draw_options
from tests.simulation.store_client import Way
from tests.simulation.store_server import StoreServer
from tests.simulation.toy_worker import PING_TIMEOUT_S, ToyWorker
from tests.simulation.verdict import fault_of_end
from tests.simulation.virtual_loop import VirtualLoop, until

RESUME_EVERY_S = 2.0
RESTART_S = (0.1, 0.6)
RESTART_BESIDE_STANDBYS_S = 5.0  # at most: mostly a standby is faster
NEWEST_FIRST = 0.8  # probability that the youngest of several is asked, where one does not know of its successor
HEALING_S = 2.0
LIMIT_S = 240.0  # virtual time in which everybody is served


class World:
    """World of a run. Everything is drawn at the beginning; `run` lets it happen."""

    def __init__(self, loop: VirtualLoop, draw: Random, history: History) -> None:
        self.loop = loop
        self.random = Random(draw.getrandbits(64))  # of what happens in the run
        self.history = history
        self.clocks = Clocks(Random(draw.getrandbits(64)))
        self.truth = JournalTruth(history)
        self.losses = Losses()
        self.store = StoreServer(loop, Random(draw.getrandbits(64)), history, self.clocks.draw("store"))
        self.store.on_taken = self._on_taken
        self.store.on_loss = self.truth.note_loss
        self.store.on_answered = self.truth.note_answered
        self.options = draw_options(draw)
        self.workers = self._draw_workers(draw)
        self.lives: list[SchedulerLife] = []  # that lead, led or are about to
        self.standbys: list[SchedulerLife] = []
        self._num_lives = 0
        self._begun_s = loop.now_s
        load = draw_load(draw)
        self._pins = load.pins
        self.clients = [self._new_client(plan, Random(draw.getrandbits(64))) for plan in load.clients]
        self.is_spared = False  # the youngest scheduler: faults are over, also those that were put off
        self.fatal_entry: int | None = None  # how many more the store takes before the leader dies
        self.fatal_step: int | None = None  # how many more the workers execute

    @property
    def orders(self) -> list[Order]:
        return [order for client in self.clients for order in client.plan.orders]

    @property
    def life(self) -> SchedulerLife:
        """The last that was to lead, or, once that is dead, one that began before it and leads still."""
        last = self.lives[-1]
        serving = [life for life in self.lives if life.serves and not life.process.is_dead]
        return serving[-1] if serving and last.process.is_dead else last

    async def serve(self) -> None:
        """Run until every client is served and no work is left. Raises TimeoutError."""
        self.start_scheduler()
        for worker in self.workers.values():
            self.loop.outside(self.random.uniform(0.0, 0.2), worker.start)
        for order in self.orders:
            if order.paused is not None:
                self.loop.outside(order.arrives_s + order.paused[0], self._pause, order)
                self.loop.outside(order.arrives_s + sum(order.paused), self._resume, order)
        for pin in self._pins:
            self.loop.outside(pin.at_s, self._pin, pin)
            if pin.unpinned_s is not None:
                self.loop.outside(pin.unpinned_s, self._unpin, pin)
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(asyncio.create_task(client.run()) for client in self.clients))
            await until(self.is_quiet, 0.5)

    def start_scheduler(self) -> None:
        self.lives.append(self._new_life(on_turn=None))

    def start_standby(self) -> SchedulerLife:
        life = self._new_life(on_turn=self._on_turn)
        self.standbys.append(life)
        return life

    def _new_life(self, *, on_turn: Callable[[SchedulerLife], None] | None) -> SchedulerLife:
        self._num_lives += 1
        self.history.note(f"scheduler-{self._num_lives} starts{' as a standby' if on_turn is not None else ''}")
        return SchedulerLife(
            self.loop,
            self._num_lives,
            self.clocks.draw("scheduler"),
            Way(self.store),
            self.workers,
            self.options,
            self.history,
            self.losses,
            self._on_end,
            self._on_lead,
            on_turn,
        )

    def _on_lead(self, life: SchedulerLife) -> None:
        if life in self.standbys:
            self.standbys.remove(life)
            self.lives.append(life)

    def kill_scheduler(self, life: SchedulerLife) -> None:
        """Kill a scheduler; another follows if it was the youngest. After all faults the youngest is spared."""
        if self.is_spared and life is self.life:
            return
        if self.is_healing():
            self.loop.outside(RESTART_S[1], self.kill_scheduler, life)
        elif not life.process.is_dead:
            life.die()
            self._on_end(life)

    def freeze_scheduler(self, life: SchedulerLife) -> None:
        """Freeze a scheduler; the pings of others time out after a while."""
        life.process.freeze()
        self.loop.outside(PING_TIMEOUT_S, self._note_silence, life)

    def is_quiet(self) -> bool:
        """True if nothing is live, waiting, or on its way into or to the store."""
        life = self.life
        if not life.serves or life.is_told_to_end or not life.process.runs:
            return False
        return (
            not life.admission.is_in_use
            and not life.recovery.num_waiting
            and not life.records.num_pending
            and not life.journal.stats.pending
            and not self.truth.unended()
            and all(each.num_used_blocks == each.num_pinned_blocks for each in life.engine.scheduler.stats().workers)
        )

    def unserved(self) -> str:
        """Describe the clients that still wait, and for what."""
        waiting = [order.request_id for order in self.orders if not order.is_done]
        states = [each.request_id for each in self.truth.unended()]
        life = self.life
        return (
            f"orders {waiting}, without an end in the journal {states}, {life.process.name} serves: {life.serves}, "
            f"live {list(life.engine.live)}, journal {life.journal.stats}"
        )

    def has_memory(self) -> bool:
        """True if one live scheduler knows everything that is in the store, and can tell it to the store.

        Not while an older one leads, too, and has not yet noticed: both may accept requests in an emptied store, which
        docs/durability.md names as a limit.
        """
        holder = self.holder()
        if holder is None or holder.way.is_cut:
            return False
        return not any(life.serves and life.process.runs for life in self.lives if life is not holder)

    def holder(self) -> SchedulerLife | None:
        """The scheduler that wrote last, and runs: what it has is all there is."""
        leading = [life for life in self.lives if life.serves and life.journal.stats.epoch == self.truth.news_epoch]
        return leading[-1] if leading and leading[-1].process.runs else None

    def kill_memory(self, life: SchedulerLife) -> None:
        """Kill a scheduler like `kill_scheduler`, though the store has just lost all: a standby knows it."""
        life.die()
        self._on_end(life)

    def is_healing(self) -> bool:
        """True while data that the store lost is not rewritten: no promise holds for it if memory is lost too."""
        if not self.store.has_lost_data:
            return False
        holder = self.holder()
        return self.loop.now_s < self.store.lost_s + HEALING_S or holder is None or holder.journal.stats.degraded

    def has_rival_while_healing(self) -> bool:
        """True if another scheduler may lead without what the store lost, should who knows it get no answer for long.

        A scheduler that is without the store for a lease counts as dead to one that never saw it: a limit that
        docs/durability.md names.
        """
        holder = self.holder()
        return self.is_healing() and any(each is not holder and each.process.runs for each in self.lives)

    def _leader(self) -> SchedulerLife | None:
        serving = [life for life in self.lives if life.serves]
        if not serving:
            return None
        life = serving[-1] if self.random.random() < NEWEST_FIRST else self.random.choice(serving)
        return life if life.process.runs else None

    def _on_turn(self, life: SchedulerLife) -> None:
        """A standby has the lease. Until it serves it stands by, and may have to do so again."""
        self.history.note(f"{life.process.name} takes over")

    def _on_end(self, life: SchedulerLife) -> None:
        if life in self.standbys:
            self.standbys.remove(life)
            if not life.is_told_to_end:
                self.history.violate(f"P4: {life.process.name} ended while it stood by")
            if self.life.process.is_dead and not self.standbys:
                self.loop.outside(RESTART_S[1], self._restart_after, self.lives[-1])
        elif life is self.lives[-1] or self.life.process.is_dead:
            slowest_s = RESTART_BESIDE_STANDBYS_S if self.standbys else RESTART_S[1]
            self.loop.outside(self.random.uniform(RESTART_S[0], slowest_s), self._restart_after, self.lives[-1])

    def _restart_after(self, last: SchedulerLife) -> None:
        if last is not self.lives[-1] or not self.life.process.is_dead:
            return
        if self.standbys and self.store.has_lost_data and any(each.process.runs for each in self.standbys):
            self.loop.outside(RESTART_BESIDE_STANDBYS_S, self._restart_after, last)  # theirs may be the only memory
        elif self.options.stands_by:
            self.start_standby()
        else:
            self.start_scheduler()

    def _note_silence(self, life: SchedulerLife) -> None:
        if life.process.is_frozen:
            for client in self.clients:
                client.server_is_silent(life)

    def _on_taken(self, entry_id: EntryId, payload: bytes) -> None:
        self.truth.take(entry_id, payload)
        if self.fatal_entry is not None:
            self.fatal_entry -= 1
            if self.fatal_entry <= 0:
                self.fatal_entry = None
                self._kill_soon()

    def _on_step(self) -> None:
        if self.fatal_step is not None:
            self.fatal_step -= 1
            if self.fatal_step <= 0:
                self.fatal_step = None
                self._kill_soon()

    def _kill_soon(self) -> None:
        """Kill at any await between now and the scheduler's notice of it."""
        delay_s = self.random.choice([0.0, self.random.uniform(0.0, 0.003)])
        self.loop.outside(delay_s, self._kill_after_turns, self.life, self.random.randrange(8))

    def _kill_after_turns(self, life: SchedulerLife, num_turns: int) -> None:
        if num_turns:
            self.loop.outside(0.0, self._kill_after_turns, life, num_turns - 1)
        else:
            self.kill_scheduler(life)

    def _verify(self, order: Order) -> None:
        fault = fault_of_end(
            order,
            self.loop.now_s - self._begun_s,
            GRACE_S,
            self.clocks.span_s("scheduler"),
            may_be_convicted=self.losses.may_convict(order.request_id),
        )
        if fault is not None:
            self.history.violate(fault)

    def is_excused(self, order: Order) -> bool:
        """True if a request had ended and its record was lost: it may have run again under its id."""
        return self.truth.ended_before(order.request_id, self.store.flushed_s)

    def _pause(self, order: Order) -> None:
        leader = self._leader()
        if leader is not None:
            leader.process.spawn(leader.pause(order.request_id, keep_on_host=self.random.random() < 0.5))

    def _resume(self, order: Order) -> None:
        """Resume more than once: the pause, or this, may still be on its way."""
        leader = self._leader()
        if leader is not None:
            leader.process.spawn(leader.resume(order.request_id))
        admitted = self.truth.owner(order.request_id)
        if not order.is_done and (admitted is None or admitted.state is None):
            self.loop.outside(RESUME_EVERY_S, self._resume, order)

    def _pin(self, pin: PinPlan) -> None:
        leader = self._leader()
        if leader is not None:
            prefix = pb.TokenIds(ids=pin.token_ids)
            leader.process.spawn(leader.pin(pb.PinPrefixRequest(name=pin.name, token_ids=prefix)))

    def _unpin(self, pin: PinPlan) -> None:
        leader = self._leader()
        if leader is not None:
            leader.process.spawn(leader.unpin(pb.UnpinPrefixRequest(name=pin.name)))

    def _new_client(self, plan: ClientPlan, random_: Random) -> Client:
        return Client(
            self.loop,
            random_,
            self.history,
            self.truth,
            plan,
            find_leader=self._leader,
            verify=self._verify,
            is_excused=self.is_excused,
        )

    def _draw_workers(self, draw: Random) -> dict[str, ToyWorker]:
        pool = worker_pb2.PoolInfo(
            num_blocks=draw.choice([72, 72, 90, 140]),
            num_host_blocks=draw.choice([0, 20, 80]),
            block_size=BLOCK_SIZE,
            bytes_per_block=1 << 20,  # so that a step that has other rows places two at most
            block_format=draw.choice(["", "toy", "toy"]),
            max_fetched_blocks=draw.choice([4, 40]),
        )
        kinds = copy(draw)  # which leaves the rest of the run as it was before workers were of several kinds
        are_unequal = kinds.random() < 0.5
        num_seats = draw.randrange(8, 33)
        slowest_s = draw.choice([0.005, 0.02, 0.05])
        return {
            worker_id: ToyWorker(
                self.loop,
                Random(draw.getrandbits(64)),
                self.history,
                self.clocks.draw("worker"),
                worker_id,
                _unlike(pool, kinds) if are_unequal else pool,
                num_seats=num_seats,
                role=kinds.choice(
                    worker_pb2.WorkerRole.values() if are_unequal else [worker_pb2.WORKER_ROLE_UNSPECIFIED]
                ),
                step_s=(0.001, slowest_s),
                find_leader=self._leader,
                on_step=self._on_step,
                find_worker=lambda address: self.workers.get(address),
            )
            for worker_id in ("w1", "w2", "w3")[: draw.choice([1, 2, 2, 3])]
        }


def _unlike(pool: worker_pb2.PoolInfo, draw: Random) -> worker_pb2.PoolInfo:
    """Draw a pool of another size, or of the same."""
    other = worker_pb2.PoolInfo()
    other.CopyFrom(pool)
    other.num_blocks = int(draw.choice([0.5, 0.75, 1, 1, 2]) * pool.num_blocks)
    return other
