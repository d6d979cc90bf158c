"""Engine: live requests from admission to end, step result by step result.

Reports to the pure scheduler what happened, and decides which samples and requests end. Text, journal and readers are
the publisher's. Knows no gRPC; worker loops and readers call it.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial

import structlog

from common.native_faults import CONTROL_FLOW
from common.sampling_params import SequenceSampling
from common.step import StepResult
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.core.memory_use import group_blocks
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.records import Records
from scheduler_svc.requests.live.computations import Computations
from scheduler_svc.requests.live.distributions import DistributionRecorder, EndCounter
from scheduler_svc.requests.live.end_report import first_token_ns, mean_token_ns, report_end
from scheduler_svc.requests.live.fault_verdicts import FaultVerdicts
from scheduler_svc.requests.live.hopeless_requests import HopelessRequests
from scheduler_svc.requests.live.live_request import FINISH_REASON_OF_STATE, LiveRequest, set_token_stop
from scheduler_svc.requests.live.live_sample import LiveSample
from scheduler_svc.requests.live.paused_requests import PausedRequests
from scheduler_svc.requests.live.publisher import Delivery, Publisher
from scheduler_svc.requests.live.recent_latency import RecentLatency
from scheduler_svc.requests.live.result_check import MAX_VOCAB_SIZE, check_forced, check_result
from scheduler_svc.requests.live.result_logprobs import store_logprobs, store_prompt_logprobs
from scheduler_svc.requests.live.settle_pace import SettlePace
from scheduler_svc.requests.live.wait_estimate import WaitEstimate

log = structlog.get_logger()

MAX_PENDING_RECORDS = 100_000  # tokens, mostly, that the store has not acknowledged
MAX_PENDING_BYTES = 64 << 20  # the same: one decision among 64 beams with log-probabilities takes 20 kB
NO_TOKEN_LEFT = "no token was left to choose for any beam: relax allowed_token_ids, logit_bias or min_tokens"


class Engine:
    """One per process. Every method runs on the event loop's thread.

    A result is processed in two halves, so that the next step is sent before text is made: `take_result` decides
    which sequences go on; `settle` makes text and journal entries, and through them the output of readers.
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
        """`stream_interval_s`: longest wait of tokens under load; the first and the last of an output do not wait."""
        self.scheduler = scheduler
        self.journal = journal
        self.records = records
        self.live: dict[str, LiveRequest] = {}  # by request_id, until the end is durable
        self.sampling_of: dict[int, SequenceSampling] = {}  # by seq_id
        self.on_result: Callable[[StepPlan], None] | None = None  # called after a result was applied
        self.on_worker_at_fault: Callable[[str], None] = lambda worker_id: None
        self.vocab_size = MAX_VOCAB_SIZE  # of the model being served
        self.num_admitted = 0
        self.num_finished = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.ends = EndCounter()
        self.distributions = DistributionRecorder()
        self._publisher = Publisher(
            journal,
            records,
            push_text=self._push_text,
            on_closed=self._on_closed,
            delivery=delivery,
            distributions=self.distributions,
        )
        self._pace = SettlePace(stream_interval_s, self.wake_workers)
        self.computations = Computations(scheduler, self.sampling_of, self.wake_workers)
        self.faults = FaultVerdicts(scheduler, self._fail_group, self.wake_workers)
        self.hopeless = HopelessRequests(scheduler, self._expire_group, self.wake_workers)
        self.waits = WaitEstimate(scheduler)
        self._num_sequences = 0  # highest number given
        self._request_of: dict[SequenceGroup, LiveRequest] = {}
        self._sample_of: dict[int, LiveSample] = {}  # by seq_id, of samples that a sequence draws
        self._with_stop_strings: set[int] = set()  # seq_ids of samples whose text may end them
        self._with_logprobs: dict[int, SequenceSampling] = {}  # by seq_id, of those that asked for any
        self._appended: list[tuple[Sequence, int]] = []  # tokens since the last settling
        self.paused = PausedRequests()
        self._wakers: list[Callable[[], None]] = []
        self._is_held_back = False
        journal.on_acknowledged = self._wake_held_back
        self.latency = RecentLatency()
        self._empty = asyncio.Event()
        self._empty.set()

    def add_waker(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever there may be new work for a worker."""
        self._wakers.append(wake)

    def remove_waker(self, wake: Callable[[], None]) -> None:
        self._wakers.remove(wake)

    def wake_workers(self) -> None:
        for wake in self._wakers:
            wake()

    def number_sequences(self, count: int) -> int:
        """Reserve `count` numbers that no other sequence has; returns the first."""
        first = self._num_sequences + 1
        self._num_sequences += count
        return first

    def skip_sequence_numbers(self, highest: int) -> None:
        """Give out no number up to `highest`: requests of earlier leaders have them."""
        self._num_sequences = max(self._num_sequences, highest)

    def start(self, request: LiveRequest, *, is_paused: bool = False) -> None:
        """Queue a request whose admission is durable. One of an earlier leader goes on from the output that it has."""
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
            sampling = request.params.sequence_sampling(request.num_prompt_tokens, index)
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
        if is_paused:
            self.paused.add(request)
        self._update_emptiness()
        self.wake_workers()

    async def pause(self, request: LiveRequest, *, keep_on_host: bool) -> None:
        """Take a request off its worker until `resume`; returns when the pause is durable. Repeating it is harmless.

        Tokens of steps in flight still come, and may end the request. The request must not have ended before.
        """
        self.scheduler.pause(request.group, keep_on_host=keep_on_host)
        self.paused.add(request)
        self._update_emptiness()
        self.wake_workers()  # its blocks may let others run
        await self.journal_pause(request.number, is_paused=True, on_durable=request.set_durable_pause)

    async def resume(self, request: LiveRequest) -> None:
        """Queue a paused request again; returns when that is durable. Repeating it is harmless."""
        self.scheduler.resume(request.group)
        self.paused.discard(request)
        self._update_emptiness()
        self.wake_workers()
        await self.journal_pause(request.number, is_paused=False, on_durable=request.set_durable_pause)

    async def journal_pause(
        self, number: int, *, is_paused: bool, on_durable: Callable[[bool], None] | None = None
    ) -> None:
        """Write into the journal that a request is paused, or goes on; returns when that is durable.

        `on_durable` is called with `is_paused` in the moment of the acknowledgement.
        """
        durable = asyncio.Event()
        change = journal_pb2.PauseChange(sequence=number, paused=is_paused)

        def acknowledge() -> None:
            if on_durable is not None:
                on_durable(is_paused)
            durable.set()

        self.journal.append(pauses=[change], on_durable=acknowledge)
        await durable.wait()

    async def wait_until_empty(self) -> None:
        """Return when no request is live but paused ones. A request whose end is not durable is still live."""
        await self._empty.wait()

    def _update_emptiness(self) -> None:
        if len(self.live) == len(self.paused):
            self._empty.set()
        else:
            self._empty.clear()

    def may_step(self) -> bool:
        """True if the journal keeps up. If it does not, more tokens would only fill the memory.

        A worker loop that is held back is woken when the journal has caught up.
        """
        is_behind = self.is_journal_behind
        self._is_held_back |= is_behind  # until all are woken: others than the loop that asks now may be
        return not is_behind

    @property
    def is_journal_behind(self) -> bool:
        """True if so much waits for the store's acknowledgement that no step is computed."""
        journal = self.journal
        return journal.num_pending >= MAX_PENDING_RECORDS or journal.pending_bytes >= MAX_PENDING_BYTES

    def _wake_held_back(self) -> None:
        if self._is_held_back and not self.is_journal_behind:
            self._is_held_back = False
            self.wake_workers()

    def record_scheduled(self, plan: StepPlan) -> None:
        """Record the moment at which requests first enter a step, and their worker."""
        for sequence in plan.whole:
            request = self._request_of.get(sequence.group)
            if request is None:
                continue
            request.last_worker_id = plan.worker_id
            if request.times.first_scheduled_ns is None:
                request.times.first_scheduled_ns = time.monotonic_ns()

    def take_result(self, plan: StepPlan, result: StepResult) -> None:
        """First half of a result: append tokens to their sequences; those that end leave the scheduler.

        Raises, before it changes anything, ImpossibleAnswerError if the result does not fit the plan, NotFiniteError
        if logits were not finite.
        """
        check_result(plan, result, self.vocab_size, self.sampling_of, self._with_logprobs)
        if result.forced:
            check_forced(plan, result, self.vocab_size, self.sampling_of, self.scheduler.num_forceable)
        appended = self.scheduler.apply(plan.worker_id, plan.step_id, result.token_ids, result.forced)
        if self.computations:
            appended = self.computations.take_results(plan.worker_id, appended)
        self.output_tokens += len(appended)
        if result.prompt_logprobs:
            store_prompt_logprobs(plan, result, self._request_of)
        if result.logprobs:
            counting = {sequence.seq_id for sequence, _ in appended}
            store_logprobs(plan, result, self._sample_of, counting)
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
                self._end_if_due(sequence)
        if result.candidates:
            self._take_candidates(plan, result)
        for worker_id in self.scheduler.record_executed_step(plan):  # last: a step whose result raised is not executed
            self.on_worker_at_fault(worker_id)
        if self.on_result is not None:
            self.on_result(plan)

    def settle_if_due(self) -> None:
        """Call `settle`, unless the new tokens can wait for those of the next steps."""
        if (self._appended or self._publisher.has_news) and self._pace.is_due(len(self._appended)):
            self.settle()

    def settle(self) -> None:
        """Second half: make text, write one journal record for everything new, release it when acknowledged."""
        appended, self._appended = self._appended, []
        request_of, sample_of = self._request_of, self._sample_of
        self._publisher.add_news({sample_of[sequence.seq_id]: request_of[sequence.group] for sequence, _ in appended})
        self._pace.record_settled(self._publisher.settle())

    def end(self, request: LiveRequest, state: pb.RequestState.ValueType, error: str = "") -> None:
        """End a request otherwise than by its own tokens. A request that has ended stays as it is."""
        if request.ended_state is None:
            self._break_off(request, state, error)
            self.settle()
            self.wake_workers()  # its blocks may let others run

    def withdraw(self, request: LiveRequest) -> None:
        """Journal the end of a request that became durable and was never started."""
        request.ended_state = pb.REQUEST_STATE_CANCELLED
        self.scheduler.finish_group(request.group)
        self.scheduler.forget_group(request.group)
        forget = partial(self.journal.forget, request.number)
        self.journal.append(finishes=[withdrawal(request.number)], on_durable=forget)

    def _fail_group(self, group: SequenceGroup, error: str) -> None:
        request = self._request_of.get(group)
        log.error("request isolated", request_id=request.request_id if request else None, reason=error)
        if request is None:
            self.computations.fail_group(group, error)
        else:
            self.end(request, pb.REQUEST_STATE_FAILED, error)

    def _expire_group(self, group: SequenceGroup) -> None:
        if group in self._request_of:
            self.end(self._request_of[group], pb.REQUEST_STATE_EXPIRED)

    def _end_if_due(self, sequence: Sequence) -> None:
        request, sample = self._request_of[sequence.group], self._sample_of[sequence.seq_id]
        if sample.finish is not None:  # another sample in this result broke off the request
            return
        is_last = sequence.num_output_tokens >= sequence.max_tokens
        finish = pb.SampleFinish(sample_index=sample.sample_index)
        if sequence.ends_with_stop_token():
            set_token_stop(finish, request.params, sequence.token_ids[-1])
        elif request.params.stop and (stop := self._push_text(request, sample, is_last=is_last)) is not None:
            finish.reason, finish.stop_string = pb.FINISH_REASON_STOP, stop
        elif is_last:
            finish.reason = pb.FINISH_REASON_LENGTH
        if finish.reason and sample.finish is None:
            self._end_sample(request, sample, finish)

    def _end_sample(self, request: LiveRequest, sample: LiveSample, finish: pb.SampleFinish) -> None:
        sample.finish = finish
        self._pace.hasten()
        self._record_blocks(request)
        assert sample.sequence is not None
        self.scheduler.finish(sample.sequence)
        if all(each.finish is not None for each in request.samples):
            self._decide_end(request, pb.REQUEST_STATE_FINISHED)

    def _take_candidates(self, plan: StepPlan, result: StepResult) -> None:
        groups: dict[SequenceGroup, None] = {}
        for row, candidates in zip(plan.candidate_rows, result.candidates, strict=True):
            sequence = plan.sequences[row]
            request = self._request_of.get(sequence.group)
            if request is None or request.ended_state is not None:
                continue
            assert request.beams is not None
            request.beams.store_candidates(sequence, candidates)
            groups[sequence.group] = None
        for group in groups:
            request = self._request_of[group]
            if request.ended_state is None and group.awaits_decision:
                self._decide_beams(request)

    def _decide_beams(self, request: LiveRequest) -> None:
        """Advance the beam search of a request whose live beams all have their candidates."""
        beams, sample = request.beams, request.samples[0]
        assert beams is not None
        num_common = len(beams.common_token_ids)
        request.pending_beam_steps += (beams.advance(self.scheduler, request.group),)
        sample.pending_logprobs += tuple(beams.common_logprobs(num_common))
        self.output_tokens += len(request.group.live)
        if not beams.is_done:
            self._publisher.add_news({sample: request})
        elif beams.hypotheses():
            self._end_beams(request, pb.REQUEST_STATE_FINISHED, None)
        else:
            self._break_off(request, pb.REQUEST_STATE_FAILED, NO_TOKEN_LEFT)

    def _end_beams(
        self, request: LiveRequest, state: pb.RequestState.ValueType, ended_by: pb.SampleFinish | None
    ) -> None:
        request.make_hypotheses_samples(ended_by)
        self._record_blocks(request)
        self.scheduler.finish_group(request.group)
        self._decide_end(request, state)

    def _break_off(self, request: LiveRequest, state: pb.RequestState.ValueType, error: str) -> None:
        """Decide the end of a request otherwise than by its own tokens; samples that have ended stay as they are."""
        request.error = error
        reason = FINISH_REASON_OF_STATE[state]
        if request.beams is not None:
            self._end_beams(request, state, pb.SampleFinish(reason=reason))
            return
        self._record_blocks(request)
        for sample in request.samples:
            if sample.finish is None:
                sample.finish = pb.SampleFinish(reason=reason, sample_index=sample.sample_index)
        self.scheduler.finish_group(request.group)
        self._decide_end(request, state)

    def _record_blocks(self, request: LiveRequest) -> None:
        if request.blocks_at_end is None:
            request.blocks_at_end = group_blocks(request.group)

    def _decide_end(self, request: LiveRequest, state: pb.RequestState.ValueType) -> None:
        request.ended_state = state
        self._pace.hasten()
        self.paused.discard(request)
        if num_output_tokens := max(sequence.num_output_tokens for sequence in request.group.sequences):
            self.waits.record_end(num_output_tokens, request.max_tokens)
        self._update_emptiness()
        request.times.finished_ns = time.monotonic_ns()
        for timer in (request.deadline, request.abandonment):
            if timer is not None:
                timer.cancel()
        self._publisher.add_news(dict.fromkeys(request.samples, request))
        self._publisher.add_end(request)

    def _push_text(self, request: LiveRequest, sample: LiveSample, *, is_last: bool = False) -> str | None:
        """Make the text of the sample's new tokens. Returns the stop string that the last one completed.

        Text that cannot be made fails its request and nothing else; tokens without text are dropped.
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
        request.times.closed_ns = time.monotonic_ns()
        del self._request_of[request.group], self.live[request.request_id]
        for sequence in request.group.sequences:
            del self.sampling_of[sequence.seq_id]
            self._sample_of.pop(sequence.seq_id, None)
            self._with_stop_strings.discard(sequence.seq_id)
            self._with_logprobs.pop(sequence.seq_id, None)
        self._update_emptiness()
        if request.closed is not None:
            request.closed.set()
        self.latency.record_end(time.monotonic(), first_token_ns(request), mean_token_ns(request))
        self.ends.record_end(request.ended_state, [each.finish.reason for each in request.samples if each.finish])
        self.distributions.record_end(request)
        report_end(request)
        self.scheduler.forget_group(request.group)


def withdrawal(number: int) -> journal_pb2.Finish:
    """End of a request that never owned its request_id."""
    return journal_pb2.Finish(
        sequence=number, state=pb.REQUEST_STATE_CANCELLED, withdrawn=True, finished_unix_ns=time.time_ns()
    )
