"""Does the faults that were drawn, and undoes them after a while."""

from collections.abc import Callable

from tests.simulation.faults import Fault
from tests.simulation.store_server import Mode
from tests.simulation.toy_worker import PING_TIMEOUT_S, ToyWorker
from tests.simulation.world import World

POSTPONED_S = 0.7  # what would lose the only copy
CONNECTED_S = 0.05  # between looks whether a client is connected
LEASE_S = 1.5  # after which a silent leader is followed by another
RELEASE_S = 6.0  # after which somebody ends a leader that has a successor and does not notice
CLOCK_JUMP_NS = 600_000_000_000
NEWCOMERS_COMMANDS = 10  # at one of which the store is flushed
LOADING_S = 0.2  # that a store needs to read what it had
DRAIN_S = (0.0, 0.3, 5.0)  # that workers have to let end or move what runs there
MOST_STEP_FAILURES = 2
HEALED_S = 20.0  # from then on nothing goes wrong any more


class Inflicting:
    """Faults inflicted on one world."""

    def __init__(self, world: World, faults: list[Fault]) -> None:
        self._world = world
        self._faults = faults
        self._is_over = False
        self._num_step_failures = 0

    def begin(self) -> None:
        for fault in self._faults:
            self._later(fault.at_s, self._do, fault)
        self._later(HEALED_S, self.end)

    def end(self) -> None:
        """End all faults."""
        world = self._world
        self._is_over = True
        world.fatal_entry = world.fatal_step = None
        world.store.thaw()
        self._end_losses()
        self._end_slowness()
        for life in world.lives:
            life.process.thaw()
        for life in world.standbys:
            life.way.cut_at(0, 0.0)
        for life in world.lives[:-1]:
            world.kill_scheduler(life)
        world.is_spared = True

    def _do(self, fault: Fault) -> None:
        if self._is_over:
            return
        self._world.history.note(f"fault: {fault.kind} {fault.number} for {fault.lasts_s} s")
        subject, _, what = fault.kind.partition(" ")
        if subject == "store":
            self._do_to_store(fault, what)
        elif subject == "standby":
            self._do_to_standbys(fault, what)
        elif subject == "clock":
            self._set_clock(fault)
        elif subject == "client":
            self._do_to_client(fault)
        elif subject in ("scheduler", "second"):
            self._do_to_scheduler(fault, what)
        else:
            workers = list(self._world.workers.values())
            self._do_to_worker(fault, workers[fault.number % len(workers)])

    def _set_clock(self, fault: Fault) -> None:
        """Set the clock of one process, a scheduler, the store or a worker, by hours or by less than a second."""
        world = self._world
        processes = [("scheduler", life.process) for life in (world.life, *world.standbys)]
        processes += [("store", world.store.process)]
        processes += [("worker", worker.process) for worker in world.workers.values()]
        role, process = processes[fault.number % len(processes)]
        by_ns = fault.number * CLOCK_JUMP_NS if fault.lasts_s > LEASE_S else round(fault.lasts_s * 1e9)
        world.clocks.set_ahead(role, process.clock, by_ns if fault.number % 3 else -by_ns)
        world.history.count(f"clock of a {role} jumps")

    def _do_to_store(self, fault: Fault, what: str) -> None:
        store = self._world.store
        modes: dict[str, Mode] = {
            "is frozen": "frozen",
            "is down": "down",
            "is full": "full",
            "is read only": "read only",
            "is told to end": "down",
        }
        if what in (*modes, "loses replies", "is slow") and self._world.has_rival_while_healing():
            self._later(POSTPONED_S, self._do, fault)
        elif what in modes:
            self._end_mode()
            store.mode = modes[what]
            if what == "is told to end":
                store.hang_up()
                self._later(fault.lasts_s, self._load_store)
            else:
                self._later(fault.lasts_s, self._end_mode)
        elif what == "loses replies":
            store.lost_replies = 0.3
            self._later(fault.lasts_s, self._end_losses)
        elif what == "is slow":
            store.delay_s = (0.02, 0.7)
            self._later(fault.lasts_s, self._end_slowness)
        elif what == "is flushed at death":
            self._flush_at_death()
        elif what == "is flushed under a newcomer":
            self._world.start_scheduler()
            self._world.life.way.before_command = self._flush_at(fault.number % NEWCOMERS_COMMANDS + 1)
            self._later(RELEASE_S, self._release_others)
        elif not self._world.has_memory():
            self._later(POSTPONED_S, self._do, fault)
        elif what == "is flushed":
            store.flush()
        else:
            store.fail_over(fault.number % 5 + 1)

    def _flush_at_death(self) -> None:
        """Flush if a standby has read all requests that have not ended, though perhaps not their last tokens."""
        world = self._world
        leader = world.holder()
        if leader is not None and any(each.knows_all(world.truth) for each in world.standbys):
            world.store.flush()
            world.kill_memory(leader)

    def _flush_at(self, num_commands: int) -> Callable[[], None]:
        """Flush the store at the last of a number of calls, if a scheduler has its contents in memory."""
        num_left = num_commands

        def count() -> None:
            nonlocal num_left
            num_left -= 1
            if not num_left and self._world.has_memory():
                self._world.store.flush()

        return count

    def _end_mode(self) -> None:
        self._world.store.thaw()

    def _load_store(self) -> None:
        """Restart the store with all its data, which it reads first."""
        self._world.store.mode = "loading"
        self._later(LOADING_S, self._end_mode)

    def _end_losses(self) -> None:
        self._world.store.lost_replies = 0.0

    def _end_slowness(self) -> None:
        self._world.store.delay_s = (0.0001, 0.001)

    def _do_to_scheduler(self, fault: Fault, what: str) -> None:
        world, life = self._world, self._world.life
        if what == "dies":
            world.kill_scheduler(life)
        elif what == "dies at entry":
            world.fatal_entry = fault.number
        elif what == "dies at step":
            world.fatal_step = fault.number
        elif what == "is told to end":
            if world.is_healing():
                self._later(POSTPONED_S, self._do, fault)
            else:
                life.tell_to_end()
        elif life.process.is_dead or life.process.is_frozen:
            return
        elif what == "leader":
            world.start_scheduler()
            self._later(RELEASE_S, self._release_others)
        else:
            world.freeze_scheduler(life)
            if fault.lasts_s > LEASE_S and fault.number % 2:
                self._later(LEASE_S, self._follow, world.lives.index(life))
            self._later(fault.lasts_s, life.process.thaw)

    def _do_to_standbys(self, fault: Fault, what: str) -> None:
        """One that starts may lose the store at a command of its take-over, and so may any that is there."""
        world = self._world
        if what == "is told to end":
            if world.standbys and not world.store.has_lost_data:  # else it may have the only memory
                world.standbys[0].tell_to_end()
            return
        standby = world.start_standby() if what == "starts" or not world.standbys else world.standbys[0]
        if what == "loses the store":
            standby.cut_in_take_over(fault.number, fault.lasts_s)

    def _do_to_client(self, fault: Fault) -> None:
        """Inflict the fault on a client as soon as it has a connection."""
        client = self._world.clients[fault.number % len(self._world.clients)]
        if not client.is_done and not client.lose_way(to_server=fault.kind == "client is unheard"):
            self._later(CONNECTED_S, self._do_to_client, fault)

    def _follow(self, place: int) -> None:
        """Let a standby take over, unless another scheduler leads already."""
        if place == len(self._world.lives) - 1 and not self._world.life.process.is_dead:
            self._world.start_scheduler()
            self._later(RELEASE_S, self._release_others)

    def _release_others(self) -> None:
        for life in self._world.lives[:-1]:
            if not life.process.is_frozen:
                self._world.kill_scheduler(life)

    def _do_to_worker(self, fault: Fault, worker: ToyWorker) -> None:
        process = worker.process
        if fault.kind == "step fails":
            # Two of them: a request that meets three is rightly taken for the one at fault.
            self._num_step_failures += 1
            worker.device.fails_next |= self._num_step_failures <= MOST_STEP_FAILURES
        elif process.is_dead or not worker.is_started:
            return
        elif fault.kind == "worker dies":
            worker.die()
            self._later(fault.lasts_s, worker.start)
        elif fault.kind == "worker is told to end":
            worker.tell_to_end(DRAIN_S[fault.number % len(DRAIN_S)], fault.lasts_s)
        elif fault.kind == "worker freezes":
            worker.freeze()
            self._later(fault.lasts_s, process.thaw)
        elif fault.kind == "worker is cut off":
            worker.cut_off()
            self._later(max(fault.lasts_s, PING_TIMEOUT_S + 0.5), self._join_again, worker)
        elif fault.kind == "worker is slow":
            worker.slowness = 20.0
            self._later(fault.lasts_s, self._end_slowness_of, worker)
        else:
            worker.break_lines("reset by peer")

    def _join_again(self, worker: ToyWorker) -> None:
        worker.is_cut_off = False

    def _end_slowness_of(self, worker: ToyWorker) -> None:
        worker.slowness = 1.0

    def _later(self, delay_s: float, do: Callable[..., None], *args: object) -> None:
        self._world.loop.outside(delay_s, do, *args)
