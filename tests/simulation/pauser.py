"""Somebody who pauses requests in a simulation, and resumes them however often that must be said."""

from random import Random

from common.errors import QuireError
from tests.simulation.load import Order
from tests.simulation.scheduler_life import SchedulerLife
from tests.simulation.world import World

INSIST_EVERY_S = 1.0


class Pauser:
    """Of one request. A store that forgets what it acknowledged may pause it again: so it is resumed to the end."""

    def __init__(self, world: World, random_: Random, order: Order) -> None:
        self._world = world
        self._request_id = order.request_id
        self._keep_on_host = random_.random() < 0.7
        self._begins_s = order.arrives_s
        self._asks_every_s = random_.choice([0.003, 0.02, 0.1])
        self._pauses_left = random_.choice([1, 2, 5])
        self._resumed_s = self._begins_s + random_.choice([0.1, 0.5, 2.0, 6.0])

    def begin(self) -> None:
        self._world.loop.outside(self._begins_s, self._pause)
        self._world.loop.outside(self._resumed_s, self._resume)

    def _pause(self) -> None:
        leader = self._world.leader()
        if leader is not None:
            leader.process.spawn(self._ask_to_pause(leader))
        if self._pauses_left > 0:
            self._world.loop.outside(self._asks_every_s, self._pause)

    def _resume(self) -> None:
        leader = self._world.leader()
        if leader is not None:
            leader.process.spawn(self._ask_to_resume(leader))
        self._world.loop.outside(INSIST_EVERY_S, self._resume)

    async def _ask_to_pause(self, leader: SchedulerLife) -> None:
        try:
            await leader.admission.pause(self._request_id, keep_on_host=self._keep_on_host)
            self._pauses_left -= 1
            self._world.history.note(f"{leader.process.name} has paused {self._request_id}")
            if self._pauses_left > 0:
                await leader.admission.resume(self._request_id)
        except QuireError:  # it is not there yet, has ended, or the store does not answer
            self._world.history.note(f"{leader.process.name} has not paused {self._request_id}")

    async def _ask_to_resume(self, leader: SchedulerLife) -> None:
        self._pauses_left = 0
        try:
            await leader.admission.resume(self._request_id)
            self._world.history.note(f"{leader.process.name} has resumed {self._request_id}")
        except QuireError:
            self._world.history.note(f"{leader.process.name} has not resumed {self._request_id}")
