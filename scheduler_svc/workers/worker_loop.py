"""Loop of one worker: schedule a step, send it, take the result, and again.

Up to `pipeline_depth` steps are in flight. The step behind the running one is decided late, once the worker's times are
known (`DecisionTime`); text and journal are made meanwhile, or after the next step has been sent.
Each worker has a loop of its own, so a slow worker delays no other.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

import structlog

from common.native_faults import CONTROL_FLOW
from common.step import StepResult, StepStatus
from quire.errors import FailedPreconditionError, QuireError
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.result_check import ImpossibleAnswerError, NotFiniteError
from scheduler_svc.workers.decision_time import DecisionTime
from scheduler_svc.workers.step_builder import build_step
from scheduler_svc.workers.step_costs import StepCosts
from scheduler_svc.workers.step_expectations import StepExpectations
from scheduler_svc.workers.step_times import StepTimes, bound_times
from scheduler_svc.workers.worker_link import WorkerLink

log = structlog.get_logger()

# A step hangs if it takes longer than both: this time, and so many times its expectation.
HUNG_AFTER_S = 5.0
HUNG_AFTER_TIMES = 20
# Where nothing comparable was measured: a first step may compile kernels, and the first long prompt takes a slow device
# minutes where decoding took milliseconds. A worker that is given up too early never finishes such a step.
HUNG_AFTER_UNKNOWN_S = 120.0


class SupersededError(FailedPreconditionError):
    """A newer scheduler leads: this one must end."""

    reason = "SUPERSEDED"


class StaleEpochError(QuireError):
    """A worker refuses our steps for a scheduler of a higher epoch. Only the store knows if there is one."""

    reason = "STALE_EPOCH"

    def __init__(self, worker_id: str, epoch: int) -> None:
        super().__init__(f"worker {worker_id} follows a scheduler of epoch {epoch}")
        self.epoch = epoch


class SentStep(NamedTuple):
    """Step in flight, with the epoch that it was sent at."""

    plan: StepPlan
    epoch: int


class RefusedStep(NamedTuple):
    """Step that counts as not executed, with the reason."""

    plan: StepPlan
    status: str
    error: str
    is_failure: bool = False  # its execution failed: its groups are suspects
    disbelieved: Collection[SequenceGroup] | None = None  # suspects of a step whose answer is not believed


class WorkerLoop:
    """Drives one worker until its link breaks."""

    def __init__(
        self,
        worker_id: str,
        link: WorkerLink,
        engine: Engine,
        *,
        current_epoch: Callable[[], int],
        send_whole: bool,
        decides_late: bool = True,
        expectations: StepExpectations | None = None,
        carry_started: Callable[[], None] = lambda: None,
    ) -> None:
        """`expectations`: of the same worker, from before its link broke. `carry_started`: see BlockCarrier."""
        self.worker_id = worker_id
        self.link = link
        self.times = StepTimes()
        self.costs = StepCosts()
        self._expectations = expectations or StepExpectations()
        self._engine = engine
        self._scheduler = engine.scheduler
        self._current_epoch = current_epoch
        self._carry_started = carry_started
        self._send_whole = send_whole  # the paper's form: every step describes every seat
        self._decision_time = DecisionTime() if decides_late else None
        self._in_flight: deque[SentStep] = deque()
        self._refused: list[RefusedStep] = []
        self._is_delaying = False  # the next step was put off
        self._last_result_ns: int | None = None
        self._executing_since_ns = 0  # when the first step in flight was sent, or the one before it was answered

    @property
    def hangs_after_s(self) -> float | None:
        """Monotonic time after which the running step counts as hung; None while no step runs."""
        if not self._in_flight or self.link.results:
            return None
        expected_s = self._expectations.expected_s(self._in_flight[0].plan)
        if expected_s is None:
            patience_s = max(HUNG_AFTER_UNKNOWN_S, HUNG_AFTER_TIMES * self.times.exec_ns / 1e9)
        else:
            patience_s = max(HUNG_AFTER_S, HUNG_AFTER_TIMES * expected_s)
        return self._executing_since_ns / 1e9 + patience_s

    def is_hung(self, now_s: float) -> bool:
        """True if the running step takes so long that it counts as hung."""
        if now_s - self._executing_since_ns / 1e9 <= HUNG_AFTER_S:  # mostly: nothing is to be looked up
            return False
        hangs_after_s = self.hangs_after_s
        return hangs_after_s is not None and now_s > hangs_after_s

    def excuse_pause(self, pause_s: float) -> None:
        """Do not count a time in which this process did not run, and could receive no result."""
        self._executing_since_ns += int(pause_s * 1e9)

    async def run(self) -> str:
        """Drive the worker until its link breaks; returns the reason.

        Raises ImpossibleAnswerError for an impossible answer, and StaleEpochError; no request is to blame for either.
        """
        self._engine.add_waker(self.link.news.set)
        try:
            while self.link.broken is None:
                delay_ns = await self._send_due_steps()
                self._engine.settle_if_due()
                self._scheduler.cache_decoded_blocks(self.worker_id)
                if not self._in_flight:
                    self._last_result_ns = None  # idle: the next result ends no iteration
                if not self.link.results:
                    await self._wait_for_news(delay_ns)
                self.link.news.clear()
                while self.link.results:
                    self._take_result(self.link.results.popleft())
            if self.link.is_unreadable:
                raise ImpossibleAnswerError(self.link.broken)
        except ImpossibleAnswerError as error:
            due = [self._in_flight[0].plan] if self._in_flight else []
            self._engine.faults.record_disbelieved_step(due, error.message)
            raise
        except (QuireError, *CONTROL_FLOW):
            raise  # the worker's doing, or our own end
        except BaseException as error:
            self._suspect_in_flight(error)
            raise
        finally:
            self._engine.remove_waker(self.link.news.set)
            self._engine.settle()
        return self.link.broken

    async def _wait_for_news(self, delay_ns: int) -> None:
        """Wait for news from the link, at most until the next decision (0: there is none)."""
        timer = asyncio.get_running_loop().call_later(delay_ns / 1e9, self.link.news.set) if delay_ns else None
        await self.link.news.wait()
        if timer is not None:
            timer.cancel()

    def _delay_ns(self) -> int:
        """Nanoseconds until the step behind the running one has to be decided; 0: it is due."""
        if self._decision_time is None or len(self._in_flight) != 1:
            return 0
        return self._decision_time.delay_ns(self._in_flight[0].plan, time.monotonic_ns() - self._executing_since_ns)

    async def _send_due_steps(self) -> int:
        """Send the steps that are due. Returns the nanoseconds until the next decision; 0: it waits for news."""
        self._carry_started()  # what a result, or the end of a fetch, has begun need not wait for the next decision
        if self._refused:
            if self._in_flight:
                return 0  # the pipeline drains first
            self._roll_back_refused()
        while self.link.broken is None and self._engine.may_step():
            if delay_ns := self._delay_ns():
                self._is_delaying = True
                return delay_ns
            if self._send_whole:
                self._scheduler.request_snapshot(self.worker_id)
            now_s = time.monotonic()
            self._engine.hopeless.drop(now_s, is_idle=not self._in_flight)
            waiting = self._scheduler.waiting
            num_before = waiting.num_groups, len(waiting)
            plan = self._scheduler.schedule(self.worker_id, now_s)
            self._carry_started()
            if waiting.num_groups > num_before[0] or len(waiting) > num_before[1]:
                self._engine.wake_workers()  # what it gave up, or has fetched and cannot start, may go on elsewhere
            was_delayed, self._is_delaying = self._is_delaying, False
            if plan is None:
                return 0
            if was_delayed and self._decision_time is not None:
                self._decision_time.record_delayed(plan.step_id)
            if not self._in_flight:
                self._executing_since_ns = time.monotonic_ns()
            epoch = self._current_epoch()
            self._in_flight.append(SentStep(plan, epoch))
            step = build_step(plan, epoch, self._engine.sampling_of)
            self._engine.record_scheduled(plan)  # before the wait: a request may end meanwhile
            self._engine.waits.record_step(plan)
            await self.link.send(step)
        return 0

    def _take_result(self, result: StepResult) -> None:
        if not self._in_flight or result.step_id != self._in_flight[0].plan.step_id:
            raise ImpossibleAnswerError(f"answered step {result.step_id}, which was not the next")
        plan, epoch = self._in_flight[0]
        if result.status is StepStatus.STALE_EPOCH:
            self._check_stale(result, epoch)
        elif result.epoch != epoch:
            raise ImpossibleAnswerError(f"answered a step of epoch {epoch} as one of epoch {result.epoch}")
        elif result.status is StepStatus.NEED_SNAPSHOT and plan.snapshot:
            raise ImpossibleAnswerError(f"asked for a snapshot in answer to one: {result.error}")
        now_ns = time.monotonic_ns()
        bound_times(result, now_ns - self._executing_since_ns)
        self._executing_since_ns = now_ns
        if result.status is not StepStatus.OK or self._refused:
            self._in_flight.popleft()
            is_failure = result.status in (StepStatus.FAILED, StepStatus.INVALID)
            self._refused.append(RefusedStep(plan, result.status.name, result.error, is_failure))
            return
        try:
            self._engine.take_result(plan, result)
        except NotFiniteError as error:
            self._in_flight.popleft()
            self._refused.append(RefusedStep(plan, error.reason, error.message, disbelieved=error.groups))
            return
        self._in_flight.popleft()
        self._learn(plan, result, now_ns)

    def _check_stale(self, result: StepResult, epoch: int) -> None:
        """Raise unless the refused step is of an earlier epoch of our own: then it is sent again."""
        if result.epoch <= epoch:
            raise ImpossibleAnswerError(f"refused epoch {epoch} for epoch {result.epoch}, which is not higher")
        if result.epoch > self._current_epoch():
            raise StaleEpochError(self.worker_id, result.epoch)

    def _learn(self, plan: StepPlan, result: StepResult, now_ns: int) -> None:
        """Learn times and costs of steps from a result that was taken."""
        overhead_ns = None
        if self._last_result_ns is not None:
            overhead_ns = max(0, now_ns - self._last_result_ns - result.exec_ns)
        self.times.add(result.exec_ns, overhead_ns)
        self._engine.distributions.record_step(plan, result.exec_ns, overhead_ns)
        self._last_result_ns = now_ns
        self._expectations.learn(plan, result.exec_ns / 1e9)
        if self._decision_time is not None:
            self._decision_time.learn(plan, result.exec_ns, result.queue_ns)
        costs = self.costs.learn(plan, result)
        if costs is not None:
            self._scheduler.workers.record_costs(self.worker_id, costs)
        if self._scheduler.has_groups_to_start:
            self._engine.wake_workers()  # what waits may have been left to another worker

    def _roll_back_refused(self) -> None:
        """Undo steps that were not executed, or are not believed, and describe every seat again."""
        first = self._refused[0]
        log.warning(
            "step not executed" if first.disbelieved is None else "step not believed",
            worker_id=self.worker_id,
            step_id=first.plan.step_id,
            status=first.status,
            error=first.error,
        )
        self._refused.clear()
        self._scheduler.rollback(self.worker_id)
        self._engine.wake_workers()  # what begins anew may be left to a worker that has nothing to do
        if first.is_failure:
            self._engine.faults.record_failed_step([first.plan], first.error)
        elif first.disbelieved is not None:
            self._engine.faults.record_disbelieved_step([first.plan], first.error, first.disbelieved)

    def _suspect_in_flight(self, error: BaseException) -> None:
        """Suspect the groups in flight after a fault of our own: a request that causes it must not block the others."""
        plans = [sent.plan for sent in self._in_flight]
        self._engine.faults.record_failed_step(plans, f"{type(error).__name__} in the scheduler")
