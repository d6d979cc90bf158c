"""A client process in a simulation: it submits, reads, hangs up, comes back with the positions that it has, and checks.

What it sees goes into its orders: each position once, in order, as the closed form has it, and nothing that the
journal does not have.
"""

import asyncio
from collections.abc import Callable
from random import Random

import grpc

from quire.silence import Silence
from quire.v1 import inference_pb2 as pb
from tests.simulation.connection import Connection, ConnectionLostError
from tests.simulation.history import History
from tests.simulation.journal_truth import JournalTruth
from tests.simulation.load import ClientPlan, Order
from tests.simulation.scheduler_life import SchedulerLife
from tests.simulation.virtual_loop import VirtualLoop

CONNECT_TIMEOUT_S = 2.0
LISTEN_S = 0.5  # between two looks for requests of which nothing is heard
RIVAL_PATIENCE_S = 20.0  # for the request that it rivals to be accepted

_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION)
_AGAIN_CODES = {code.value[0] for code in _AGAIN}
_ALREADY_EXISTS: int = grpc.StatusCode.ALREADY_EXISTS.value[0]


class Client:
    """Lives until all its orders are done, or until it leaves."""

    def __init__(
        self,
        loop: VirtualLoop,
        random_: Random,
        history: History,
        truth: JournalTruth,
        plan: ClientPlan,
        *,
        find_leader: Callable[[], SchedulerLife | None],
        verify: Callable[[Order], None],
        is_excused: Callable[[Order], bool],
    ) -> None:
        self.plan = plan
        self._loop = loop
        self._random = random_
        self._history = history
        self._truth = truth
        self._find_leader = find_leader
        self._verify = verify
        self._is_excused = is_excused
        self._begun_s = loop.now_s
        self._connection: Connection | None = None
        self._leader: SchedulerLife | None = None
        self._away_until_s = 0.0
        self._has_left = False
        self._num_handles = 0
        self._order_of: dict[int, Order] = {}  # by handle, of this connection
        self._let_go: set[int] = set()  # handles
        self._silences: dict[Order, Silence] = {}
        self._positions: dict[int, dict[int, int]] = {}  # by handle and sample: what comes next

    @property
    def is_done(self) -> bool:
        return self._has_left or all(order.is_done for order in self.plan.orders)

    async def run(self) -> None:
        for at_s, away_s in self.plan.absences:
            self._loop.outside(at_s, self._go_away, away_s)
        if self.plan.leaves_s is not None:
            self._loop.outside(self.plan.leaves_s, self._leave)
        for order in self.plan.orders:
            self._loop.outside(order.arrives_s, self._start, order)
        await asyncio.sleep(min(order.arrives_s for order in self.plan.orders))
        while not self.is_done:
            await asyncio.sleep(max(self._random.uniform(0.01, 0.2), self._away_until_s - self._loop.now_s))
            leader = self._find_leader()
            if leader is None or self.is_done:
                continue
            self._leader = leader
            self._connection = Connection(self._loop, self._random, leader.process)
            leader.process.call_later(0.0005, leader.accept, self._connection)
            self._loop.outside(CONNECT_TIMEOUT_S, self._connection.lose_if_unserved)
            self._loop.outside(LISTEN_S, self._look_for_silent, self._connection)
            try:
                await self._converse(self._connection)
            except ConnectionLostError:
                self._history.note(f"{self.plan.name} lost {leader.process.name}")
            self._forget_connection()

    def server_is_silent(self, leader: SchedulerLife) -> None:
        """Handle the keepalive's report that the server is silent."""
        if self._connection is not None and self._leader is leader:
            self._connection.lose()

    def lose_way(self, *, to_server: bool) -> bool:
        """Break its path to the scheduler on one side, without telling anybody. False if it has none."""
        if self._connection is None or self._connection.half_open_s is not None:
            return False
        self._history.count("client's path dies on one side")
        self._connection.lose_way(to_server=to_server)
        return True

    def _look_for_silent(self, connection: Connection) -> None:
        """Act like the SDK: attach again to requests without messages, and leave a silent connection."""
        if connection is not self._connection or self.is_done:
            return
        orders = list(self._order_of.items())
        actions = [self._silences[order].next_action(self._loop.now_s) for _, order in orders]
        if "renew" in actions:
            if connection.half_open_s is not None:
                self._history.count("client leaves a path that died on one side")
            connection.lose()
            return
        for (handle, order), action in zip(orders, actions, strict=True):
            if action == "ask":
                self._attach_again(handle, order)
        self._loop.outside(LISTEN_S, self._look_for_silent, connection)

    def _attach_again(self, handle: int, order: Order) -> None:
        assert self._connection is not None
        del self._order_of[handle]
        self._let_go.add(handle)
        self._start(order)
        self._connection.say(pb.SessionRequest(handle=handle, detach=pb.Detachment()))

    async def _converse(self, connection: Connection) -> None:
        for order in self.plan.orders:
            self._start(order)
        while not self.is_done:
            response = await connection.next_response()
            for event in response.events:
                self._take(event)
            if self.plan.reading_pause_s:
                await asyncio.sleep(self.plan.reading_pause_s)
        connection.hang_up(self._random.choice([0.0, 0.01]))

    def _start(self, order: Order) -> None:
        """Submits it, or attaches to it, if it is time."""
        connection, now_s = self._connection, self._loop.now_s
        if connection is None or order.is_done or order in self._order_of.values():
            return
        if now_s < self._begun_s + order.arrives_s:
            return
        if order.rival_of is not None and not order.rival_of.is_accepted:
            if order.rival_of.is_done or now_s > self._begun_s + RIVAL_PATIENCE_S:
                self._give_up(order)
            else:
                self._loop.outside(0.2, self._start, order)
            return
        self._num_handles += 1
        handle = self._num_handles
        self._order_of[handle] = order
        self._silences.setdefault(order, Silence()).record_request(now_s)
        if order.absent_since_s is None:
            order.absent_since_s = now_s
        if order.is_accepted and (self._is_excused(order) or self._random.random() < 0.8):
            positions = [len(sample.token_ids) for sample in order.samples]
            attach = pb.Attach(request_id=order.request_id, from_positions=positions)
            self._positions[handle] = dict(enumerate(positions))
            connection.say(pb.SessionRequest(handle=handle, attach=attach))
        else:
            self._positions[handle] = {}
            connection.say(pb.SessionRequest(handle=handle, submit=order.request))
        if order.cancels_after_s is not None:
            due_s = self._begun_s + order.arrives_s + order.cancels_after_s
            self._loop.outside(max(0.0, due_s - now_s), self._cancel, order, handle)

    def _cancel(self, order: Order, handle: int) -> None:
        if self._connection is not None and self._order_of.get(handle) is order and not order.is_done:
            order.was_cancelled = True
            self._connection.say(pb.SessionRequest(handle=handle, cancel=pb.Cancellation()))

    def _take(self, event: pb.SessionEvent) -> None:
        if event.handle in self._let_go:
            return
        order = self._order_of.get(event.handle)
        kind = event.WhichOneof("event")
        if order is None:
            self._history.violate(f"{self.plan.name}: {kind} for handle {event.handle}, which is closed")
            return
        self._note_heard(order, kind)
        if kind == "accepted":
            self._note_presence(order)
            self._history.note(f"{self.plan.name} {order.request_id} accepted {event.accepted.attached}")
            if order.rival_of is not None and not self._is_excused(order):
                self._history.violate(f"{order.request_id} was accepted with two bodies")
            order.is_accepted = True
        elif kind == "chunk":
            self._take_chunk(order, event.handle, event.chunk)
        elif kind == "finished":
            del self._order_of[event.handle]
            self._end(order, event.finished)
        else:
            del self._order_of[event.handle]
            self._take_error(order, event.error)

    def _note_heard(self, order: Order, kind: str | None) -> None:
        silence = self._silences[order]
        if kind == "chunk":
            silence.record_output(self._loop.now_s)
        else:
            silence.record_answer(self._loop.now_s)

    def _take_chunk(self, order: Order, handle: int, chunk: pb.Chunk) -> None:
        index, name = chunk.index, f"{self.plan.name} {order.request_id}"
        due = self._positions[handle].get(index, 0)
        self._positions[handle][index] = chunk.position + chunk.num_tokens
        self._history.note(f"{name} chunk {index} {chunk.position} {list(chunk.token_ids)} {chunk.finish.reason}")
        sample = order.sample(index)
        if self._is_excused(order):
            self._give_up(order)
            return
        if chunk.position != due or chunk.num_tokens != len(chunk.token_ids):
            self._history.violate(f"P2: {name} got position {chunk.position} of sample {index}, {due} was due")
        known = sample.token_ids[chunk.position : chunk.position + chunk.num_tokens]
        if known != list(chunk.token_ids[: len(known)]):
            self._history.violate(f"P2: {name} sample {index}: {known} had been delivered, now {chunk.token_ids}")
        sample.token_ids += chunk.token_ids[len(known) :]
        sample.logprobs += chunk.logprobs[len(known) :]
        if chunk.prompt_logprobs:
            order.prompt_logprobs = [(each.token_id, each.logprob) for each in chunk.prompt_logprobs]
        if chunk.HasField("finish"):
            if sample.finish is not None and sample.finish != chunk.finish:
                self._history.violate(f"P2: {name} sample {index} ended by {sample.finish}, and by {chunk.finish}")
            sample.finish = chunk.finish
        admitted = self._truth.owner(order.request_id)
        if admitted is None or (
            index < len(admitted.tokens)
            and not order.request.sampling.best_of
            and len(sample.token_ids) > len(admitted.tokens[index])
        ):
            self._history.violate(f"P4: {name} was delivered what is not in the journal")

    def _end(self, order: Order, finished: pb.Finished) -> None:
        state = pb.RequestState.Name(finished.state)
        self._history.note(f"{self.plan.name} {order.request_id} {state} {finished.error}")
        if self._is_excused(order):
            self._give_up(order)
            return
        admitted = self._truth.owner(order.request_id)
        if admitted is None or admitted.state != finished.state:
            self._history.violate(f"P4: {order.request_id} was told {state}, and the journal says {admitted}")
        order.finished = finished
        self._verify(order)

    def _take_error(self, order: Order, error: pb.Error) -> None:
        self._history.note(f"{self.plan.name} {order.request_id} error {error.code} {error.message}")
        if error.code in _AGAIN_CODES:
            self._loop.outside(self._random.uniform(0.1, 0.6), self._start, order)
        elif self._is_excused(order) or (error.code == _ALREADY_EXISTS and order.rival_of is not None):
            self._give_up(order)
        else:
            self._give_up(order)
            known = "accepted " if order.is_accepted else ""
            self._history.violate(f"P1: {known}{order.request_id} was refused: {error.code} {error.message}")

    def _give_up(self, order: Order) -> None:
        order.is_refused = True
        if self.is_done and self._connection is not None:
            self._connection.hang_up(0.0)

    def _note_presence(self, order: Order) -> None:
        now_s = self._loop.now_s
        assert order.absent_since_s is not None
        if not order.is_present:
            order.away_s = max(order.away_s, now_s - order.absent_since_s)
        order.is_present = True

    def _forget_connection(self) -> None:
        half_open_s = self._connection.half_open_s if self._connection is not None else None
        since_s = self._loop.now_s if half_open_s is None else half_open_s
        for order in self._order_of.values():
            if order.is_present:
                order.is_present, order.absent_since_s = False, since_s
        self._connection = None
        self._order_of.clear()

    def _go_away(self, away_s: float) -> None:
        self._away_until_s = self._loop.now_s + away_s
        if self._connection is not None:
            self._connection.hang_up(self._random.choice([0.0, 0.01, 1.0]))

    def _leave(self) -> None:
        self._has_left = True
        if self._connection is not None:
            self._connection.hang_up(0.0)
