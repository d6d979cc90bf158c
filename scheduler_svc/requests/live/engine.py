"""The engine: from an admitted request to its end, step result by step result.

Holds the live requests, hands the pure scheduler what happened, and decides what ends with it. Text, journal and
readers are the publisher's. It knows no gRPC; workers and readers come to it.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable

import structlog

from common.native_faults import CONTROL_FLOW
from common.slot_sampling import SlotSampling
from common.step import StepResult
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.core.isolation import Verdict
from scheduler_svc.core.memory_use import group_blocks
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.records import Records
from scheduler_svc.requests.live.computations import Computation, Computations
from scheduler_svc.requests.live.end_report import first_token_ns, mean_token_ns, report_end
from scheduler_svc.requests.live.live_request import FINISH_REASON_OF_STATE, LiveRequest, set_token_stop
from scheduler_svc.requests.live.live_sample import LiveSample
from scheduler_svc.requests.live.paused_requests import PausedRequests
from scheduler_svc.requests.live.publisher import Delivery, Publisher
from scheduler_svc.requests.live.queue_wait import QueueWait
from scheduler_svc.requests.live.recent_latency import RecentLatency
from scheduler_svc.requests.live.result_check import MAX_VOCAB_SIZE, check_result
from scheduler_svc.requests.live.result_logprobs import keep_logprobs, keep_prompt_logprobs
from scheduler_svc.requests.live.settle_pace import SettlePace
from scheduler_svc.requests.live.slot_releases import SlotReleases

log = structlog.get_logger()

MAX_PENDING_RECORDS = 100_000  # tokens, mostly, that the store has not acknowledged
MAX_PENDING_BYTES = 64 << 20  # of those: a decision among 64 beams with log-probabilities is one record of 20 kB
NO_TOKEN_LEFT = "no token was left to choose for any beam: relax allowed_token_ids, logit_bias or min_tokens"
HOPELESS_EVERY_S = 0.05  # how often the queue is searched for requests that would come too late


class Engine:
    """One per process. Every method runs on the event loop's thread.

    A result is taken in two halves, so that the next step is on its way before text is made: `take_result` decides
    which sequences go on, `settle` makes text, journal entries and, through them, what readers see.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        journal: Journal,
        records: Records,
        *,
        delivery: Delivery = "durable",
        stream_interval_s: float = 0.0,
    ) -> None:
        """`stream_interval_s`: how long tokens may wait under load, but for the first and the last of an output."""
        self.scheduler = scheduler
        self.journal = journal
        self.records = records
        self.live: dict[str, LiveRequest] = {}  # by request_id, until the end is durable
        self.sampling_of: dict[int, SlotSampling] = {}  # by seq_id
        self.on_result: Callable[[StepPlan], None] | None = None  # once a result is with its sequences
        self.on_worker_at_fault: Callable[[str], None] = lambda worker_id: None
        self.vocab_size = MAX_VOCAB_SIZE  # of the model being served
        self.num_admitted = 0
        self.num_finished = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self._publisher = Publisher(
            journal,
            records,
            push_text=self._push_text,
            on_durable=self._wake_held_back,
            on_closed=self._on_closed,
            delivery=delivery,
        )
        self._pace = SettlePace(stream_interval_s, self.wake_workers)
        self._computations = Computations(scheduler, self.sampling_of)
        self._num_sequences = 0  # that were numbered
        self._request_of: dict[SequenceGroup, LiveRequest] = {}
        self._sample_of: dict[int, LiveSample] = {}  # by seq_id, of those that are drawn
        self._with_stop_strings: set[int] = set()  # seq_ids of samples whose text may end them
        self._with_logprobs: dict[int, SlotSampling] = {}  # by seq_id, of those that asked for any
        self._appended: list[tuple[Sequence, int]] = []  # what results brought since the last settling
        self.paused = PausedRequests()
        self._wakers: list[Callable[[], None]] = []
        self._is_held_back = False
        self.queue_wait = QueueWait()
        self.latency = RecentLatency()
        self._slot_releases = SlotReleases(scheduler.workers.slot_use)
        self._hopeless_sought_s = 0.0
        self._hopeless_timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def add_waker(self, wake: Callable[[], None]) -> None:
        """`wake` is called when there may be new work for a worker."""
        self._wakers.append(wake)

    def remove_waker(self, wake: Callable[[], None]) -> None:
        self._wakers.remove(wake)

    def wake_workers(self) -> None:
        for wake in self._wakers:
            wake()

    def number_sequences(self, count: int) -> int:
        """The first of `count` numbers that no other sequence has."""
        first = self._num_sequences + 1
        self._num_sequences += count
        return first

    def count_sequences_from(self, highest: int) -> None:
        """Numbers up to `highest` are taken: by requests of earlier leaders."""
        self._num_sequences = max(self._num_sequences, highest)

    def compute(self, group: SequenceGroup, computation: Computation) -> None:
        """Queues a group that is no request: see `computations`. Its end makes nobody wait."""
        self._computations.start(group, computation)
        self.wake_workers()

    def cancel_computation(self, group: SequenceGroup) -> None:
        """Nobody is told of its end. Harmless if it has ended."""
        self._computations.cancel(group)
        self.wake_workers()

    def start(self, request: LiveRequest, *, is_paused: bool = False) -> None:
        """Queues a request whose admission is durable. One of an earlier leader goes on from the output that it has."""
        self.live[request.request_id] = request
        if request.times.accepted_ns is None:
            request.times.accepted_ns = time.monotonic_ns()
        deadline_s = request.group.deadline_s
        if deadline_s is not None:
            request.deadline = asyncio.get_running_loop().call_later(
                deadline_s - time.monotonic(), self.end, request, pb.REQUEST_STATE_EXPIRED
            )
        self.num_admitted += 1
        self.prompt_tokens += request.num_prompt_tokens
        self._request_of[request.group] = request
        for index, sequence in enumerate(request.group.sequences):
            sampling = request.params.slot_sampling(request.num_prompt_tokens, index)
            self.sampling_of[sequence.seq_id] = sampling
            if sampling.num_logprobs is not None or sampling.num_prompt_logprobs is not None:
                self._with_logprobs[sequence.seq_id] = sampling
        for sample in request.samples:
            if sample.sequence is not None:
                self._sample_of[sample.sequence.seq_id] = sample
                if request.params.stop:
                    self._with_stop_strings.add(sample.sequence.seq_id)
                if sample.finish is not None:
                    self.scheduler.finish(sample.sequence)
        self.scheduler.add(request.group, is_paused=is_paused)
        request.durable.is_paused = is_paused
        if is_paused:
            self.paused.add(request)
        self._note_emptiness()
        self.wake_workers()

    async def pause(self, request: LiveRequest, *, keep_on_host: bool) -> None:
        """Takes a request off its worker until `resume`; returns when that is durable. Again is harmless.

        Tokens of steps in flight still come, and may end it. It must not have ended.
        """
        self._take_off(request, keep_on_host=keep_on_host)
        self.wake_workers()  # its blocks may let others run
        await self.note_pause(request.number, is_paused=True, on_durable=request.note_durable_pause)

    async def resume(self, request: LiveRequest) -> None:
        """Queues a paused request again; returns when that is durable. Again is harmless. It must not have ended."""
        self.scheduler.resume(request.group)
        self.paused.discard(request)
        self._note_emptiness()
        self.wake_workers()
        await self.note_pause(request.number, is_paused=False, on_durable=request.note_durable_pause)

    async def note_pause(
        self, number: int, *, is_paused: bool, on_durable: Callable[[bool], None] | None = None
    ) -> None:
        """Writes into the journal that a request is paused, or goes on, and returns when it is durable.

        `on_durable` is told `is_paused` at once then.
        """
        durable = asyncio.Event()
        change = journal_pb2.PauseChange(sequence=number, paused=is_paused)

        def note() -> None:
            if on_durable is not None:
                on_durable(is_paused)
            durable.set()

        self.journal.append(sequences=(), tokens=(), pauses=[change], on_durable=note)
        await durable.wait()

    def _take_off(self, request: LiveRequest, *, keep_on_host: bool) -> None:
        self.scheduler.pause(request.group, keep_on_host=keep_on_host)
        self.paused.add(request)
        self._note_emptiness()

    async def wait_until_empty(self) -> None:
        """Returns when no request is live but paused ones. One whose end is not durable is still live."""
        await self._empty.wait()

    def _note_emptiness(self) -> None:
        if len(self.live) == len(self.paused):
            self._empty.set()
        else:
            self._empty.clear()

    def may_step(self) -> bool:
        """Whether the journal keeps up. Where it does not, computing more tokens would only fill the memory.

        Who is held back is woken when it does again.
        """
        self._is_held_back = self.is_journal_behind
        return not self._is_held_back

    @property
    def is_journal_behind(self) -> bool:
        """Whether so much waits for the store to acknowledge it that no step is computed."""
        journal = self.journal
        return journal.num_pending >= MAX_PENDING_RECORDS or journal.pending_bytes >= MAX_PENDING_BYTES

    def _wake_held_back(self) -> None:
        if self._is_held_back and self.may_step():
            self.wake_workers()

    def drop_hopeless(self, now_s: float, *, is_idle: bool) -> None:
        """Ends, now and then, requests whose deadline will have passed before their prompt could be computed.

        A worker that is idle would not ask again by itself: it is woken for that.
        """
        if not self.scheduler.waiting.num_groups:
            return
        early_s = self._hopeless_sought_s + HOPELESS_EVERY_S - now_s
        if early_s > 0:
            if is_idle and self._hopeless_timer is None:
                self._hopeless_timer = asyncio.get_running_loop().call_later(early_s, self._wake_to_drop)
            return
        self._hopeless_sought_s = now_s
        for group in self.scheduler.expired_groups(now_s):
            if group in self._request_of:
                self.end(self._request_of[group], pb.REQUEST_STATE_EXPIRED)

    def _wake_to_drop(self) -> None:
        self._hopeless_timer = None
        self.wake_workers()

    def note_scheduled(self, plan: StepPlan) -> None:
        """Keeps the moment at which requests first enter a step, and how fast they leave the queue."""
        now_s = time.monotonic()
        self.queue_wait.note_step(now_s, self.scheduler.waiting.num_served, len(self.scheduler.waiting))
        self._slot_releases.note_step(now_s, plan.worker_id, goes_on=len(plan.sequences) > len(plan.whole))
        for sequence in plan.whole:
            request = self._request_of.get(sequence.group)
            if request is None:
                continue
            request.last_worker_id = plan.worker_id
            if request.times.first_scheduled_ns is None:
                request.times.first_scheduled_ns = time.monotonic_ns()

    def take_result(self, plan: StepPlan, result: StepResult) -> None:
        """First half of a result: tokens go to their sequences, and those that end leave the scheduler.

        Raises, and has changed nothing, ImpossibleAnswerError if the result does not fit the plan, NotFiniteError if
        logits were not finite.
        """
        check_result(plan, result, self.vocab_size, self.sampling_of, self._with_logprobs)
        appended = self.scheduler.apply(plan.worker_id, plan.step_id, result.token_ids)
        if self._computations:
            appended = self._computations.take(plan.worker_id, appended)
        self.output_tokens += len(appended)
        if result.prompt_logprobs:
            keep_prompt_logprobs(plan, result, self._request_of)
        if result.logprobs:
            counting = {sequence.seq_id for sequence, _ in appended}
            keep_logprobs(plan, result, self._sample_of, counting)
        self._appended += appended
        for sequence, token_id in appended:  # the next step waits for this loop
            num_output_tokens = len(sequence.token_ids) - sequence.num_prompt_tokens
            if num_output_tokens == 1:
                self._pace.hasten()
            if (
                token_id in sequence.stop_token_ids
                or num_output_tokens >= sequence.max_tokens
                or sequence.seq_id in self._with_stop_strings
            ):
                self._end_if_due(sequence, token_id)
        if result.candidates:
            self._take_candidates(plan, result)
        for worker_id in self.scheduler.record_executed_step(plan):  # last: whose results raise has not come past them
            self.on_worker_at_fault(worker_id)
        if self.on_result is not None:
            self.on_result(plan)

    def settle_if_due(self) -> None:
        """`settle`, or nothing if what is new can wait for what the next steps bring."""
        if (self._appended or self._publisher.has_news) and self._pace.is_due(len(self._appended)):
            self.settle()

    def settle(self) -> None:
        """Second half: text, one journal record for all that is new, release on its acknowledgement."""
        appended, self._appended = self._appended, []
        request_of, sample_of = self._request_of, self._sample_of
        self._publisher.note({sample_of[sequence.seq_id]: request_of[sequence.group] for sequence, _ in appended})
        self._pace.note_settled(self._publisher.settle())

    def end(self, request: LiveRequest, state: pb.RequestState.ValueType, error: str = "") -> None:
        """Ends a request otherwise than by its own tokens. A request that has ended stays as it is."""
        if request.ended_state is None:
            self._break_off(request, state, error)
            self.settle()
            self.wake_workers()  # its blocks may let others run

    def expected_wait_s(self, num_ahead: int) -> float:
        """Seconds until a newcomer with so many ahead of it would get a worker; 0: nothing says that it waits."""
        now_s = time.monotonic()
        return max(self.queue_wait.expected_s(now_s, num_ahead), self._slot_releases.expected_s(now_s, num_ahead))

    def withdraw(self, request: LiveRequest) -> None:
        """Keeps the end of a request that became durable and was never started."""
        request.ended_state = pb.REQUEST_STATE_CANCELLED
        self.scheduler.finish_group(request.group)
        self.scheduler.forget_group(request.group)
        self.journal.append(
            sequences=(),
            tokens=(),
            finishes=[withdrawal(request.number)],
            on_durable=lambda: self.journal.forget(request.number),
        )

    def note_failed_step(self, plans: Iterable[StepPlan], error: str) -> None:
        """What these plans were to do raised: who was in them is tried apart, and who fails alone too often is failed.

        What had been planned is taken back already, or its worker is about to be removed.
        """
        self._fail_guilty(self.scheduler.record_failed_step(plans), error)

    def note_disbelieved_step(
        self, plans: Iterable[StepPlan], error: str, suspects: Collection[SequenceGroup] | None = None
    ) -> None:
        """As `note_failed_step`, of steps whose answers cannot be believed; of them only `suspects` are concerned."""
        self._fail_guilty(self.scheduler.record_failed_step(plans, suspects=suspects, is_disbelieved=True), error)

    def _fail_guilty(self, verdicts: Iterable[Verdict], error: str) -> None:
        for guilty in verdicts:
            attempts = counted(guilty.num_failed_steps, "attempt")
            self._fail_alone(
                guilty.group, f"the request made the model fail in {attempts}, the last while running alone: {error}"
            )
        self.wake_workers()  # who was in them may be another worker's to try

    def lose_worker(self, worker_id: str, reason: str) -> list[Sequence]:
        """A worker is lost with all that it had. Returns what ran there; it waits again.

        A request that was alone in the steps that ended workers, too often, is failed.
        """
        guilty = self.scheduler.record_worker_loss(worker_id, time.monotonic())
        lost = self.scheduler.workers.remove_worker(worker_id)
        for each in guilty:
            times, lone = counted(each.num_losses, "time"), each.num_lone_losses
            last = f"last {lone}" if lone > 1 else "last"
            crashes = f"request crashed its worker {times}, the {last} while running alone"
            self._fail_alone(each.group, f"{crashes}; send another prompt or other parameters: {reason}")
        return lost

    def _fail_alone(self, group: SequenceGroup, error: str) -> None:
        request = self._request_of.get(group)
        log.error("request isolated", request_id=request.request_id if request else None, reason=error)
        if request is None:
            self._computations.fail(group, error)
        else:
            self.end(request, pb.REQUEST_STATE_FAILED, error)

    def _end_if_due(self, sequence: Sequence, token_id: int) -> None:
        request, sample = self._request_of[sequence.group], self._sample_of[sequence.seq_id]
        if sample.finish is not None:  # its request was broken off by another sample in this very result
            return
        is_last = sequence.num_output_tokens >= sequence.max_tokens
        finish = pb.SampleFinish(sample_index=sample.sample_index)
        if sequence.ends_with_stop_token():
            set_token_stop(finish, request.params, token_id)
        elif request.params.stop and (stop := self._push_text(request, sample, is_last=is_last)) is not None:
            finish.reason, finish.stop_string = pb.FINISH_REASON_STOP, stop
        elif is_last:
            finish.reason = pb.FINISH_REASON_LENGTH
        if finish.reason and sample.finish is None:
            self._end_sample(request, sample, finish)

    def _end_sample(self, request: LiveRequest, sample: LiveSample, finish: pb.SampleFinish) -> None:
        sample.finish = finish
        self._pace.hasten()
        self._note_blocks(request)
        assert sample.sequence is not None
        self.scheduler.finish(sample.sequence)
        if all(each.finish is not None for each in request.samples):
            self._decide(request, pb.REQUEST_STATE_FINISHED)

    def _take_candidates(self, plan: StepPlan, result: StepResult) -> None:
        groups: dict[SequenceGroup, None] = {}
        for row, candidates in zip(plan.candidate_rows, result.candidates, strict=True):
            sequence = plan.sequences[row]
            request = self._request_of.get(sequence.group)
            if request is None or request.ended_state is not None:
                continue
            assert request.beams is not None
            request.beams.keep(sequence, candidates)
            groups[sequence.group] = None
        for group in groups:
            request = self._request_of[group]
            if request.ended_state is None and group.awaits_decision:
                self._decide_beams(request)

    def _decide_beams(self, request: LiveRequest) -> None:
        """All live beams of a request have their candidates: the search takes a step."""
        beams, sample = request.beams, request.samples[0]
        assert beams is not None
        num_common = len(beams.common_token_ids)
        request.pending_beam_steps += (beams.advance(self.scheduler, request.group),)
        sample.pending_logprobs += tuple(beams.common_logprobs(num_common))
        self.output_tokens += len(request.group.live)
        if not beams.is_done:
            self._publisher.note({sample: request})
        elif beams.hypotheses():
            self._end_beams(request, pb.REQUEST_STATE_FINISHED, None)
        else:
            self._break_off(request, pb.REQUEST_STATE_FAILED, NO_TOKEN_LEFT)

    def _end_beams(
        self, request: LiveRequest, state: pb.RequestState.ValueType, ended_by: pb.SampleFinish | None
    ) -> None:
        request.make_hypotheses_samples(ended_by)
        self._note_blocks(request)
        self.scheduler.finish_group(request.group)
        self._decide(request, state)

    def _break_off(self, request: LiveRequest, state: pb.RequestState.ValueType, error: str) -> None:
        """Decides the end of a request otherwise than by its own tokens; samples that have ended stay as they are."""
        request.error = error
        reason = FINISH_REASON_OF_STATE[state]
        if request.beams is not None:
            self._end_beams(request, state, pb.SampleFinish(reason=reason))
            return
        self._note_blocks(request)
        for sample in request.samples:
            if sample.finish is None:
                sample.finish = pb.SampleFinish(reason=reason, sample_index=sample.sample_index)
        self.scheduler.finish_group(request.group)
        self._decide(request, state)

    def _note_blocks(self, request: LiveRequest) -> None:
        if request.blocks_at_end is None:
            request.blocks_at_end = group_blocks(request.group)

    def _decide(self, request: LiveRequest, state: pb.RequestState.ValueType) -> None:
        request.ended_state = state
        self._pace.hasten()
        self.paused.discard(request)
        if num_output_tokens := max(sequence.num_output_tokens for sequence in request.group.sequences):
            self._slot_releases.note_end(num_output_tokens, request.max_tokens)
        self._note_emptiness()
        request.times.finished_ns = time.monotonic_ns()
        for timer in (request.deadline, request.abandonment):
            if timer is not None:
                timer.cancel()
        self._publisher.note(dict.fromkeys(request.samples, request))
        self._publisher.note_end(request)

    def _push_text(self, request: LiveRequest, sample: LiveSample, *, is_last: bool = False) -> str | None:
        """Brings the text up to the sample's tokens. Returns the stop string that the last one completed.

        A text that cannot be made fails its request and nothing else; tokens without text are dropped.
        """
        try:
            return sample.push_text(is_last=is_last)
        except CONTROL_FLOW:
            raise
        except BaseException:  # the tokenizer's library may panic
            log.exception("text not made", request_id=request.request_id)
            error = "the text of its output could not be made by the model's tokenizer; the scheduler's log says why"
            if request.ended_state is None:
                self._break_off(request, pb.REQUEST_STATE_FAILED, error)
            else:
                request.ended_state, request.error = pb.REQUEST_STATE_FAILED, error
            sample.finish = pb.SampleFinish(reason=pb.FINISH_REASON_FAILED, sample_index=sample.sample_index)
            sample.drop_tokens_without_text()
            return None

    def _on_closed(self, request: LiveRequest) -> None:
        self.num_finished += 1
        del self._request_of[request.group], self.live[request.request_id]
        for sequence in request.group.sequences:
            del self.sampling_of[sequence.seq_id]
            self._sample_of.pop(sequence.seq_id, None)
            self._with_stop_strings.discard(sequence.seq_id)
            self._with_logprobs.pop(sequence.seq_id, None)
        self._note_emptiness()
        if request.closed is not None:
            request.closed.set()
        self.latency.note_end(time.monotonic(), first_token_ns(request), mean_token_ns(request))
        report_end(request)
        self.scheduler.forget_group(request.group)


def counted(number: int, what: str) -> str:
    """For people."""
    return f"{number} {what}s" if number != 1 else f"1 {what}"


def withdrawal(number: int) -> journal_pb2.Finish:
    """The end of a request that never owned its request_id."""
    return journal_pb2.Finish(
        sequence=number, state=pb.REQUEST_STATE_CANCELLED, withdrawn=True, finished_unix_ns=time.time_ns()
    )
