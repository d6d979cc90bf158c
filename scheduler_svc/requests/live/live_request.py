"""Live request: state of a request from its admission to its end, as the engine holds it.

Knows its samples, and its forms for readers and for the journal; decides only which of its samples come back.
"""

import asyncio
from dataclasses import dataclass, field

from common.arrays import pack_int32
from common.waits import TimerInTurns
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.core.memory_use import GroupBlocks, group_blocks
from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.requests.live.beam_decoding import BeamDecoding, hypothesis_logprobs
from scheduler_svc.requests.live.live_sample import LiveSample, new_sample
from scheduler_svc.requests.live.output_stream import OutputStream, SampleStream
from scheduler_svc.requests.params.request_params import ValidatedParams
from scheduler_svc.text.tokenizer import ModelTokenizer

OWN_ENDS = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)  # of samples that ended by themselves
FINISH_REASON_OF_STATE = {
    pb.REQUEST_STATE_CANCELLED: pb.FINISH_REASON_CANCELLED,
    pb.REQUEST_STATE_EXPIRED: pb.FINISH_REASON_DEADLINE,
    pb.REQUEST_STATE_FAILED: pb.FINISH_REASON_FAILED,
}


@dataclass(slots=True, kw_only=True)
class RequestTimes:
    """Moments of a request, by the monotonic clock, in nanoseconds; None while they have not come."""

    arrived_ns: int
    arrived_unix_ns: int
    accepted_ns: int | None = None
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    finished_ns: int | None = None  # its end was decided
    closed_ns: int | None = None  # its end was durable, and so seen by its readers

    @property
    def seen_end_ns(self) -> int | None:
        """Moment of its end as its readers see it; until then that of the decision."""
        return self.closed_ns if self.closed_ns is not None else self.finished_ns

    def to_pb(self) -> pb.Timings:
        def since(moment_ns: int | None) -> int:
            return max(0, moment_ns - self.arrived_ns) if moment_ns is not None else 0

        return pb.Timings(
            accepted_ns=since(self.accepted_ns),
            first_scheduled_ns=since(self.first_scheduled_ns),
            first_token_ns=since(self.first_token_ns),
            finished_ns=since(self.finished_ns),
        )


@dataclass(slots=True)
class DurableState:
    """Part of a request that the journal has acknowledged, besides the tokens of samples that are drawn."""

    beam_steps: list[journal_pb2.BeamStep] = field(default_factory=list)
    has_prompt_logprobs: bool = False
    num_preemptions: int = 0
    is_paused: bool = False
    finish: journal_pb2.Finish | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """One request. `samples`: those that are drawn; for beams the one that streams, and at the end every hypothesis."""

    params: ValidatedParams
    digest: bytes
    tokenizer: ModelTokenizer | None
    group: SequenceGroup
    samples: list[LiveSample]
    beams: BeamDecoding | None
    stream: OutputStream
    times: RequestTimes
    ended_state: pb.RequestState.ValueType | None = None  # decided, perhaps not yet durable
    error: str = ""
    last_worker_id: str | None = None  # of the last worker that ran it; None: none did
    outcome: pb.Finished | None = None  # the end as readers and the journal have it; made once, when it is settled
    blocks_at_end: GroupBlocks | None = None  # that it held when its first sample ended
    deadline: asyncio.TimerHandle | None = None
    abandonment: TimerInTurns | None = None  # runs while no reader is there
    pending_beam_steps: tuple[journal_pb2.BeamStep, ...] = ()  # not yet settled
    are_prompt_logprobs_settled: bool = False
    num_settled_preemptions: int = 0
    admission: journal_pb2.Admission | None = None  # as the journal has it
    durable: DurableState = field(default_factory=DurableState)
    replaces_record: bool = False  # that the store has of it, which is damaged
    closed: asyncio.Event | None = None  # set when its end is durable; made by who waits for that

    @property
    def request_id(self) -> str:
        return self.params.request_id

    @property
    def number(self) -> int:
        """Number of its first sequence, by which the journal names the request."""
        return self.group.arrival

    @property
    def num_prompt_tokens(self) -> int:
        return self.group.sequences[0].num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of its prompt and of its samples."""
        return self.num_prompt_tokens + sum(sample.num_tokens for sample in self.samples)

    @property
    def has_output(self) -> bool:
        """True if a reader may have seen a token, perhaps under an earlier leader."""
        return any(each.num_released for each in self.stream.samples)

    @property
    def max_tokens(self) -> int:
        """Bound of the output in force, in tokens."""
        return self.group.sequences[0].max_tokens

    @property
    def state(self) -> pb.RequestState.ValueType:
        """State that clients may see: an end counts once it is durable."""
        if self.stream.finished is not None:
            return self.stream.finished.state
        if self.ended_state is not None and self.times.first_scheduled_ns is not None:
            return pb.REQUEST_STATE_RUNNING
        if self.group.is_paused:
            return pb.REQUEST_STATE_PAUSED
        running = any(each.status is SequenceStatus.RUNNING for each in self.group.sequences)
        return pb.REQUEST_STATE_RUNNING if running else pb.REQUEST_STATE_WAITING

    def make_hypotheses_samples(self, ended_by: pb.SampleFinish | None) -> None:
        """Turn the hypotheses of a search that is over into samples.

        `ended_by`: cause that cut the search short, if any; hypotheses that had ended by themselves keep their ends.
        """
        assert self.beams is not None
        hypotheses = self.beams.hypotheses()
        num_common = len(self.beams.common_token_ids)
        prompt = self.group.sequences[0].token_ids[: self.num_prompt_tokens]
        for index, hypothesis in enumerate(hypotheses):
            if index:
                self.samples.append(new_sample(self.params, prompt, self.tokenizer, None))
            sample = self.samples[index]
            logprobs = hypothesis_logprobs(hypothesis)
            num_known = num_common if not index else 0
            sample.token_ids.extend(hypothesis.token_ids[num_known:])
            sample.pending_logprobs += tuple(logprobs[num_known:])
            sample.finish = pb.SampleFinish(score=hypothesis.score)
            if hypothesis.finish == "eos":
                set_token_stop(sample.finish, self.params, hypothesis.token_ids[-1])
            else:
                sample.finish.reason = pb.FINISH_REASON_LENGTH if ended_by is None else ended_by.reason
        if not hypotheses:
            self.samples[0].finish = ended_by or pb.SampleFinish(reason=pb.FINISH_REASON_FAILED)

    def choose_samples(self) -> list[SampleStream]:
        """Choose the samples that come back. Every sample must have ended and be settled."""
        if self.params.is_ranked:
            for sample in self.samples:
                if sample.finish is not None and sample.stream.logprobs:
                    sample.finish.score = sample.mean_logprob
            ranked = sorted(self.samples, key=lambda sample: sample.mean_logprob, reverse=True)
            return [sample.stream for sample in ranked[: self.params.num_samples]]
        return [sample.stream for sample in self.samples]

    def usage(self) -> pb.Usage:
        return pb.Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=sum(sample.num_released for sample in self.stream.samples),
            cached_tokens=self.group.sequences[0].num_cached_tokens,
            num_preemptions=self.group.num_preemptions,
        )

    def memory(self) -> pb.RequestMemory:
        """Memory that it takes now; after the first end of a sample, as it was then."""
        blocks, group = self.blocks_at_end or group_blocks(self.group), self.group
        return pb.RequestMemory(
            blocks=blocks.num_blocks,
            shared_blocks=blocks.num_shared,
            saved_blocks=blocks.num_saved,
            host_blocks=blocks.num_host_blocks,
            copied_blocks=group.num_copied_blocks,
            swapped_out_blocks=group.num_swapped_out_blocks,
            swapped_in_blocks=group.num_swapped_in_blocks,
            fetched_blocks=group.num_fetched_blocks,
            recomputed_tokens=group.num_recomputed_tokens,
        )

    def settle_outcome(self) -> pb.Finished:
        """Settle the end as readers will see it. `ended_state` must be decided, and every sample settled."""
        assert self.ended_state is not None and self.outcome is None
        usage = self.usage()
        usage.completion_tokens = sum(len(sample.token_ids) for sample in self.choose_samples())
        if self.times.first_token_ns is None and usage.completion_tokens and not self.has_output:
            self.times.first_token_ns = self.times.finished_ns  # they come in one piece
        self.outcome = pb.Finished(
            state=self.ended_state,
            usage=usage,
            timings=self.times.to_pb(),
            error=self.error,
            memory=self.memory(),
        )
        return self.outcome

    def to_finish_entry(self) -> journal_pb2.Finish:
        """Journal entry of the end; the outcome must be settled."""
        assert self.outcome is not None
        times = self.times
        finished_unix_ns = times.arrived_unix_ns + (times.finished_ns or times.arrived_ns) - times.arrived_ns
        return journal_pb2.Finish(
            sequence=self.number,
            state=self.outcome.state,
            error=self.outcome.error,
            finished_unix_ns=finished_unix_ns,
            outcome=self.outcome,
        )

    async def until_closed(self) -> None:
        """Return when its end is durable."""
        if self.stream.finished is None:
            self.closed = self.closed or asyncio.Event()
            await self.closed.wait()

    def set_durable_pause(self, is_paused: bool) -> None:
        """Record that the journal has acknowledged a pause, or its end."""
        self.durable.is_paused = is_paused

    def restate(self, entry: journal_pb2.JournalEntry) -> None:
        """Add its durable state, and nothing more, to an entry that restates requests."""
        assert self.admission is not None
        drawn = self.samples if self.beams is None else ()
        entry.restatements.add(
            admission=self.admission,
            samples=[_restated(sample) for sample in drawn],
            beam_steps=self.durable.beam_steps,
            prompt_logprobs=self.stream.prompt_logprobs if self.durable.has_prompt_logprobs else (),
            num_preemptions=self.durable.num_preemptions,
            pause=journal_pb2.PauseChange(sequence=self.number, paused=True) if self.durable.is_paused else None,
        )
        if self.durable.finish is not None:
            entry.finishes.append(self.durable.finish)

    def to_response(self) -> pb.GetRequestResponse:
        """Answer of GetRequest: the released part of the output, and the state."""
        finished = self.stream.finished
        return pb.GetRequestResponse(
            request_id=self.request_id,
            state=self.state,
            samples=[
                pb.SampleOutput(
                    text=sample.released_text,
                    token_ids=sample.token_ids[: sample.num_released],
                    finish=sample.finish,
                )
                for sample in self.stream.samples
            ],
            usage=finished.usage if finished else self.usage(),
            timings=finished.timings if finished else self.times.to_pb(),
            error=finished.error if finished else "",
            created_unix_ns=self.times.arrived_unix_ns,
            seed=self.params.seed,
            tenant=self.params.tenant,
            memory=finished.memory if finished else self.memory(),
            annotation=self.params.annotation,
            in_reasoning=self.stream.accepted.in_reasoning,
        )


def _restated(sample: LiveSample) -> journal_pb2.RestatedSample:
    num_tokens, finish = sample.num_durable, sample.finish
    has_finish = finish is not None and sample.is_end_durable and finish.reason in OWN_ENDS
    return journal_pb2.RestatedSample(
        token_ids=pack_int32(sample.stream.token_ids[:num_tokens]),
        logprobs=sample.stream.logprobs[:num_tokens],
        finish=finish if has_finish else None,
    )


def set_token_stop(finish: pb.SampleFinish, params: ValidatedParams, token_id: int) -> None:
    """Set a finish to that of a sample that ended with this token."""
    finish.reason = pb.FINISH_REASON_STOP
    if token_id in params.eos_token_ids:
        finish.eos_token_id = token_id
    else:
        finish.stop_token_id = token_id
