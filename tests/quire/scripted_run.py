"""Run of a request on the scripted server, and its progress.

Token j of sample i is id 1000 * i + j, spelled with a space before it: sample 0 says " 0 1 2", sample 1 " 1000 1001".
"""

from dataclasses import dataclass, field
from itertools import accumulate

from quire.errors import QuireError
from quire.v1 import inference_pb2 as pb

ALL = 1 << 30
CREATED_UNIX_NS = 10**18
MEMORY = {"blocks": 6, "shared_blocks": 2, "saved_blocks": 4, "copied_blocks": 3, "swapped_out_blocks": 5}


@dataclass(slots=True, kw_only=True)
class Script:
    """Script of a request."""

    num_tokens: int = 8  # of each sample
    num_samples: int | None = None  # that come back, where they are fewer than were asked for
    released: int = ALL  # tokens of each sample out at once; the others when the test says so
    tokens_per_chunk: int = ALL
    refusals: list[QuireError] = field(default_factory=list)  # of its submissions and attachments, in order
    state: pb.RequestState.ValueType = pb.REQUEST_STATE_FINISHED
    error: str = ""
    silent: bool = False  # never answered at all
    waiting_for: str = ""  # what it says that it waits for
    before: str = " "  # each token in the text
    in_reasoning: bool = False


@dataclass(slots=True, eq=False)
class Run:
    """A request as the server holds it."""

    request: pb.GenerateRequest
    script: Script
    state: pb.RequestState.ValueType = pb.REQUEST_STATE_RUNNING
    released: list[int] = field(init=False)  # tokens, by sample

    def __post_init__(self) -> None:
        num_samples = self.script.num_samples
        self.released = [0] * (self.num_asked if num_samples is None else num_samples)
        self.release(self.script.released)

    @property
    def num_asked(self) -> int:
        return self.request.sampling.n if self.request.sampling.HasField("n") else 1

    @property
    def has_ended(self) -> bool:
        return self.state not in (pb.REQUEST_STATE_RUNNING, pb.REQUEST_STATE_PAUSED)

    def sample_has_ended(self, index: int) -> bool:
        return self.has_ended or self.released[index] == self.script.num_tokens

    def release(self, num_tokens: int, index: int | None = None) -> None:
        """Lets tokens of one sample or of each out, up to `num_tokens` in all; ends the request if all are out."""
        for each in range(len(self.released)) if index is None else [index]:
            self.released[each] = min(num_tokens, self.script.num_tokens)
        if all(each == self.script.num_tokens for each in self.released) and not self.has_ended:
            self.state = self.script.state

    def accepted(self, attached: bool) -> pb.Accepted:
        return pb.Accepted(
            request_id=self.request.request_id,
            num_prompt_tokens=3,
            max_tokens=self.script.num_tokens,
            seed=self.request.sampling.seed or 7,
            attached=attached,
            num_samples=self.num_asked,
            created_unix_ns=CREATED_UNIX_NS,
            in_reasoning=self.script.in_reasoning,
        )

    def chunk(self, index: int, start: int) -> pb.Chunk:
        end = min(self.released[index], start + self.script.tokens_per_chunk)
        token_ids = range(1000 * index + start, 1000 * index + end)
        text = "".join(f"{self.script.before}{token}" for token in token_ids)
        chunk = pb.Chunk(index=index, position=start, num_tokens=end - start, text=text)
        if self.request.output.token_ids:
            chunk.token_ids.extend(token_ids)
        if self.request.output.text_ends:
            chunk.text_ends.extend(accumulate(len(f"{self.script.before}{token}") for token in token_ids))
        if self.sample_has_ended(index) and end == self.released[index]:
            chunk.finish.CopyFrom(self.finish(index))
        return chunk

    def finish(self, index: int) -> pb.SampleFinish:
        if self.state == pb.REQUEST_STATE_CANCELLED:
            return pb.SampleFinish(reason=pb.FINISH_REASON_CANCELLED)
        if self.state == pb.REQUEST_STATE_EXPIRED:
            return pb.SampleFinish(reason=pb.FINISH_REASON_DEADLINE)
        if self.state == pb.REQUEST_STATE_FAILED:
            return pb.SampleFinish(reason=pb.FINISH_REASON_FAILED)
        if self.request.HasField("beam"):
            return pb.SampleFinish(reason=pb.FINISH_REASON_LENGTH, score=-0.5 - index)
        sample_index = self.request.sampling.first_sample_index + index
        return pb.SampleFinish(reason=pb.FINISH_REASON_STOP, stop_string="!", sample_index=sample_index)

    def finished(self) -> pb.Finished:
        return pb.Finished(
            state=self.state,
            usage=pb.Usage(prompt_tokens=3, completion_tokens=sum(self.released), cached_tokens=1),
            timings=pb.Timings(accepted_ns=10**6, first_token_ns=2 * 10**6, finished_ns=3 * 10**6),
            error=self.script.error,
            memory=pb.RequestMemory(**MEMORY) if self.num_asked > 1 else None,
        )

    def record(self) -> pb.GetRequestResponse:
        samples = []
        for index, num_tokens in enumerate(self.released):
            finish = self.finish(index) if self.sample_has_ended(index) else None
            token_ids = range(1000 * index, 1000 * index + num_tokens)
            samples.append(pb.SampleOutput(text=self.chunk(index, 0).text, token_ids=token_ids, finish=finish))
        finished = self.finished()
        return pb.GetRequestResponse(
            request_id=self.request.request_id,
            state=self.state,
            samples=samples,
            usage=finished.usage,
            created_unix_ns=CREATED_UNIX_NS,
            seed=7,
            tenant=self.request.tenant,
            annotation=self.request.annotation,
            memory=finished.memory,
            waiting_for="" if self.has_ended else self.script.waiting_for,
        )

    def summary(self) -> pb.RequestSummary:
        states = {
            pb.REQUEST_STATE_RUNNING: pb.LIVE_STATE_QUEUED if self.script.waiting_for else pb.LIVE_STATE_RUNNING,
            pb.REQUEST_STATE_PAUSED: pb.LIVE_STATE_PAUSED,
        }
        return pb.RequestSummary(
            request_id=self.request.request_id,
            tenant=self.request.tenant,
            state=states[self.state],
            prompt_tokens=3,
            output_tokens=sum(self.released),
            num_samples=self.num_asked,
            beam_width=self.request.beam.beam_width,
            priority=self.request.priority,
            age_ms=90_000,
            worker_id="" if self.script.waiting_for else "w0",
            waiting_for=self.script.waiting_for,
        )
