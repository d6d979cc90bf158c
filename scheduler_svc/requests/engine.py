"""The engine: from an admitted request to its durable end, step result by step result.

Holds the live requests, hands the pure scheduler what happened and the journal what must be kept, and releases
output to readers once the journal has acknowledged it. It knows no gRPC; workers and readers come to it.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial

import structlog

from common.slot_sampling import SlotSampling
from common.step import StepResult
from protos import inference_pb2 as pb
from protos import journal_pb2
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.records import Records
from scheduler_svc.requests.live_request import FINISH_REASON_OF_STATE, LiveRequest
from scheduler_svc.requests.result_check import check_result
from scheduler_svc.requests.token_logprobs import token_logprobs

log = structlog.get_logger()

MAX_FAILED_STEPS = 3
MAX_PENDING_RECORDS = 100_000  # tokens, mostly, that the store has not acknowledged


class Engine:
    """One per process. Every method runs on the event loop's thread.

    A result is taken in two halves, so that the next step is on its way before text is made: `take_result` decides
    which sequences go on, `settle` makes text, journal entries and, through them, what readers see.
    """

    def __init__(self, scheduler: Scheduler, journal: Journal, records: Records) -> None:
        self.scheduler = scheduler
        self.journal = journal
        self.records = records
        self.live: dict[str, LiveRequest] = {}  # by request_id, until the end is durable
        self.sampling_of: dict[int, SlotSampling] = {}  # by seq_id
        self.num_admitted = 0
        self.num_finished = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self._by_sequence: dict[int, LiveRequest] = {}
        self._with_stop_strings: set[int] = set()  # seq_ids of requests whose text may end them
        self._appended: list[tuple[Sequence, int]] = []  # what results brought since the last settling
        self._unsettled: dict[int, LiveRequest] = {}  # by seq_id: with news of another kind
        self._wakers: list[Callable[[], None]] = []
        self._is_held_back = False
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

    def start(self, request: LiveRequest) -> None:
        """Queues a request whose admission is durable."""
        sequence = request.sequence
        self.live[request.request_id] = request
        self._empty.clear()
        request.times.accepted_ns = time.monotonic_ns()
        self.num_admitted += 1
        self.prompt_tokens += sequence.num_prompt_tokens
        self._by_sequence[sequence.seq_id] = request
        if request.checks_stop_strings:
            self._with_stop_strings.add(sequence.seq_id)
        self.sampling_of[sequence.seq_id] = request.slot_sampling
        self.scheduler.add(SequenceGroup([sequence], arrival=sequence.seq_id))
        self.wake_workers()

    async def wait_until_empty(self) -> None:
        """Returns when no request is live."""
        await self._empty.wait()

    def may_step(self) -> bool:
        """Whether the journal keeps up. Where it does not, computing more tokens would only fill the memory.

        Who is held back is woken when it does again.
        """
        self._is_held_back = self.journal.stats.pending >= MAX_PENDING_RECORDS
        return not self._is_held_back

    def note_scheduled(self, plan: StepPlan) -> None:
        """Keeps the moment at which requests first enter a step."""
        for sequence in plan.whole:
            request = self._by_sequence[sequence.seq_id]
            if request.times.first_scheduled_ns is None:
                request.times.first_scheduled_ns = time.monotonic_ns()

    def take_result(self, plan: StepPlan, result: StepResult) -> None:
        """First half of a result: tokens go to their sequences, and those that end leave the scheduler.

        Raises ValueError, and has changed nothing, if the result does not fit the plan.
        """
        check_result(plan, result)
        appended = self.scheduler.apply(plan.worker_id, plan.step_id, result.token_ids)
        self.output_tokens += len(appended)
        invalid = {plan.sampled_sequences[sample].seq_id for sample in result.invalid_samples}
        if result.prompt_logprobs:
            self._keep_prompt_logprobs(plan, result)
        if result.logprobs:
            self._keep_logprobs(plan, result, {sequence.seq_id for sequence, _ in appended} - invalid)
        self._appended += appended
        suspects = self._with_stop_strings | invalid if invalid else self._with_stop_strings
        for sequence, token_id in appended:  # the next step waits for this loop
            if (
                token_id in sequence.stop_token_ids
                or len(sequence.token_ids) >= sequence.num_prompt_tokens + sequence.max_tokens
                or sequence.seq_id in suspects
            ):
                self._end_if_due(self._by_sequence[sequence.seq_id], token_id, is_valid=sequence.seq_id not in invalid)

    def _end_if_due(self, request: LiveRequest, token_id: int, *, is_valid: bool) -> None:
        sequence = request.sequence
        if not is_valid:
            sequence.token_ids.pop()
            self._decide_failed(request, "the model's logits were not finite")
        elif sequence.ends_with_stop_token():
            self._decide(request, pb.REQUEST_STATE_FINISHED, _token_stop(request, token_id))
        elif request.checks_stop_strings and (stop := self._push_text(request)) is not None:
            finish = pb.SampleFinish(reason=pb.FINISH_REASON_STOP, stop_string=stop)
            self._decide(request, pb.REQUEST_STATE_FINISHED, finish)
        elif sequence.num_output_tokens >= sequence.max_tokens and request.ended_state is None:
            finish = pb.SampleFinish(reason=pb.FINISH_REASON_LENGTH)
            self._decide(request, pb.REQUEST_STATE_FINISHED, finish)

    def settle(self) -> None:
        """Second half: text, one journal record for all that is new, release on its acknowledgement."""
        requests = self._pop_unsettled()
        if not requests:
            return
        sequences: list[int] = []
        tokens: list[int] = []
        logprobs: list[journal_pb2.DeltaLogprobs] = []
        finishes: list[journal_pb2.Finish] = []
        releases: list[tuple[LiveRequest, int, bool]] = []
        for request in requests:
            stream, sequence = request.stream, request.sequence
            self._push_text(request)
            first, start = len(stream.token_ids), len(tokens)
            fresh = sequence.token_ids[sequence.num_prompt_tokens + first :]
            stream.token_ids.extend(fresh)
            tokens.extend(fresh)
            sequences.extend([sequence.seq_id] * len(fresh))
            if request.pending_logprobs:
                stream.logprobs.extend(request.pending_logprobs)
                logprobs.extend(
                    journal_pb2.DeltaLogprobs(delta=start + i, logprobs=each)
                    for i, each in enumerate(request.pending_logprobs)
                )
                request.pending_logprobs = []
            if request.ended_state is not None:
                finishes.append(request.to_finish_entry())
            releases.append((request, len(stream.token_ids), request.ended_state is not None))
        self.journal.append(
            sequences=sequences,
            tokens=tokens,
            logprobs=logprobs,
            finishes=finishes,
            on_durable=partial(self._release, releases),
        )

    def _pop_unsettled(self) -> list[LiveRequest]:
        by_sequence, unsettled = self._by_sequence, self._unsettled
        for sequence, _ in self._appended:
            unsettled[sequence.seq_id] = by_sequence[sequence.seq_id]
        self._appended, self._unsettled = [], {}
        return list(unsettled.values())

    def end(self, request: LiveRequest, state: pb.RequestState.ValueType, error: str = "") -> None:
        """Ends a request otherwise than by its own tokens. A request that has ended stays as it is."""
        if request.ended_state is not None:
            return
        request.error = error
        self._unsettled[request.sequence.seq_id] = request
        self._decide(request, state, pb.SampleFinish(reason=FINISH_REASON_OF_STATE[state]))
        self.settle()
        self.wake_workers()  # its blocks may let others run

    def withdraw(self, request: LiveRequest) -> None:
        """Keeps the end of a request that became durable and was never started."""
        request.ended_state = pb.REQUEST_STATE_CANCELLED
        request.finish = pb.SampleFinish(reason=pb.FINISH_REASON_CANCELLED)
        self.journal.append(
            sequences=(),
            tokens=(),
            finishes=[request.to_finish_entry()],
            on_durable=partial(self.journal.forget, request.sequence.seq_id),
        )

    def note_failed_step(self, plan: StepPlan, error: str) -> None:
        """Counts a step that raised against every request in it; fails those that were in too many in a row."""
        for sequence in plan.sequences:
            request = self._by_sequence.get(sequence.seq_id)
            if request is not None and request.count_failed_step() >= MAX_FAILED_STEPS:
                self.end(request, pb.REQUEST_STATE_FAILED, f"the model could not compute it: {error}")

    def _decide(self, request: LiveRequest, state: pb.RequestState.ValueType, finish: pb.SampleFinish) -> None:
        request.ended_state = state
        request.finish = finish
        request.times.finished_ns = time.monotonic_ns()
        for timer in (request.deadline, request.abandonment):
            if timer is not None:
                timer.cancel()
        self.scheduler.finish(request.sequence)

    def _decide_failed(self, request: LiveRequest, error: str) -> None:
        request.error = error
        self._decide(request, pb.REQUEST_STATE_FAILED, pb.SampleFinish(reason=pb.FINISH_REASON_FAILED))

    def _push_text(self, request: LiveRequest) -> str | None:
        """Brings the text up to the sequence's tokens. Returns the stop string that the last one completed.

        A text that cannot be made fails its request and nothing else; tokens without text are dropped.
        """
        try:
            return self._push_new_tokens(request)
        except Exception:
            log.exception("text not made", request_id=request.request_id)
            self._decide_failed(request, "the text of its output could not be made")
            request.drop_tokens_without_text()
            return None

    def _push_new_tokens(self, request: LiveRequest) -> str | None:
        sequence, text = request.sequence, request.text
        fresh = sequence.token_ids[sequence.num_prompt_tokens + len(text.released_ends) :]
        has_stop_token = bool(fresh) and request.finish is not None and _is_token_stop(request.finish)
        final = fresh.pop() if has_stop_token else None
        stop = None
        for token_id in fresh:
            stop = text.push(token_id)
        if final is not None:
            text.push_final(final)
        if request.ended_state is not None:
            text.finish()
        return stop

    def _release(self, releases: Iterable[tuple[LiveRequest, int, bool]]) -> None:
        now_ns = time.monotonic_ns()
        if self._is_held_back and self.may_step():
            self.wake_workers()
        for request, num_tokens, is_end in releases:
            if request.times.first_token_ns is None and num_tokens:
                request.times.first_token_ns = now_ns
            if is_end:
                self._close(request)
            else:
                request.stream.release(num_tokens)

    def _close(self, request: LiveRequest) -> None:
        assert request.finish is not None
        stream = request.stream
        stream.num_released = len(stream.token_ids)
        finished = request.to_finished()
        stream.close(request.finish, finished)
        self.num_finished += 1
        seq_id = request.sequence.seq_id
        del self._by_sequence[seq_id], self.sampling_of[seq_id], self.live[request.request_id]
        self._with_stop_strings.discard(seq_id)
        record = request.to_record().SerializeToString()
        self.records.put(request.request_id, record, partial(self.journal.forget, seq_id))
        if not self.live:
            self._empty.set()
        log.info(
            "request ended",
            request_id=request.request_id,
            state=pb.RequestState.Name(finished.state),
            output_tokens=len(stream.token_ids),
            error=request.error or None,
        )

    def _keep_logprobs(self, plan: StepPlan, result: StepResult, seq_ids: set[int]) -> None:
        for sample, rows in result.logprobs.items():
            seq_id = plan.sampled_sequences[sample].seq_id
            if seq_id in seq_ids:
                self._by_sequence[seq_id].pending_logprobs.extend(token_logprobs([result.token_ids[sample]], rows))

    def _keep_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        by_slot = {sequence.slot: sequence for sequence in plan.sequences}
        for item in result.prompt_logprobs:
            sequence = by_slot.get(item.slot)
            request = self._by_sequence.get(sequence.seq_id) if sequence is not None else None
            if sequence is None or request is None:
                continue
            kept = request.stream.prompt_logprobs
            num_known = len(kept) + 1 - item.position  # computed again, after a preemption or on another worker
            if num_known >= 0:
                tokens = sequence.token_ids[item.position : item.position + len(item.rows.logprobs)]
                kept.extend(token_logprobs(tokens, item.rows)[num_known:])


def _token_stop(request: LiveRequest, token_id: int) -> pb.SampleFinish:
    if token_id in request.params.eos_token_ids:
        return pb.SampleFinish(reason=pb.FINISH_REASON_STOP, eos_token_id=token_id)
    return pb.SampleFinish(reason=pb.FINISH_REASON_STOP, stop_token_id=token_id)


def _is_token_stop(finish: pb.SampleFinish) -> bool:
    return finish.WhichOneof("cause") in ("eos_token_id", "stop_token_id")
