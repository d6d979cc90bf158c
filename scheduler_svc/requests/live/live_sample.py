"""One sample of a live request: its tokens, their text, and how much of both is settled.

Settled means that the text is made and the tokens are handed to the journal. Decides nothing.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import fmean

from quire.v1 import inference_pb2 as pb
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.requests.live.output_stream import SampleStream
from scheduler_svc.requests.params.request_params import ValidatedParams
from scheduler_svc.text.output_text import OutputText
from scheduler_svc.text.tokenizer import ModelTokenizer

_CONTEXT_TOKENS = 16  # with text, before the first output token
_MOST_LOOKED_AT = 1024  # tokens of the prompt, if many of the last ones have no text


@dataclass(slots=True, kw_only=True, eq=False)
class LiveSample:
    """One sample. `stream.token_ids` holds the settled tokens."""

    token_ids: list[int]  # shared with its sequence, or with the beams' common tokens: they append
    num_prompt_tokens: int  # at the head of token_ids, not of the output
    text: OutputText
    stream: SampleStream
    sequence: Sequence | None = None  # that draws it; None for beams
    sample_index: int = 0  # of its noise
    finish: pb.SampleFinish | None = None  # decided, though perhaps not yet durable
    is_end_settled: bool = False
    num_durable: int = 0  # settled tokens that the journal has acknowledged
    is_end_durable: bool = False
    released_ns: int | None = None  # when tokens were last released, by the monotonic clock; None: not here
    pending_logprobs: tuple[pb.TokenLogprobs, ...] = ()  # of tokens not yet settled

    @property
    def num_tokens(self) -> int:
        """Output tokens, settled or not."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the settled tokens; -inf without tokens."""
        return fmean(each.logprob for each in self.stream.logprobs) if self.stream.logprobs else float("-inf")

    def push_text(self, *, is_last: bool = False) -> str | None:
        """Make the text of the new tokens. Returns the stop string that the last one completed.

        `is_last`: no token follows, so no text is held back.
        """
        text = self.text
        fresh = self.token_ids[self.num_prompt_tokens + len(text.released_ends) :]
        has_stop_token = bool(fresh) and self.finish is not None and _is_token_stop(self.finish)
        final = fresh.pop() if has_stop_token else None
        stop = None
        for token_id in fresh:
            stop = text.push(token_id)
        if final is not None:
            text.push_final(final)
        if is_last or self.finish is not None:
            stop = text.finish() or stop
        return stop

    def settle_tokens(self) -> list[int]:
        """Move new tokens to the stream, where they wait for their release, and return them."""
        stream = self.stream
        fresh = self.token_ids[self.num_prompt_tokens + len(stream.token_ids) :]
        stream.token_ids.extend(fresh)
        return fresh

    def settle_logprobs(self) -> Seq[pb.TokenLogprobs]:
        """Move new log-probabilities to the stream, as `settle_tokens` does tokens."""
        fresh, self.pending_logprobs = self.pending_logprobs, ()
        if fresh:
            self.stream.add_logprobs(fresh)
        return fresh

    def drop_tokens_without_text(self) -> None:
        """Drop the tokens behind the last one that has text. The sample must have ended."""
        assert self.finish is not None
        del self.token_ids[self.num_prompt_tokens + len(self.text.released_ends) :]
        self.pending_logprobs = self.pending_logprobs[: self.num_tokens - len(self.stream.token_ids)]


def new_sample(
    params: ValidatedParams,
    prompt: Seq[int],
    tokenizer: ModelTokenizer | None,
    sequence: Sequence | None,
    index: int = 0,
) -> LiveSample:
    """A sample without output: sample `index` of the request, drawn by `sequence`, or one of beams."""
    text = OutputText(
        tokenizer,
        () if tokenizer is None else context_of(prompt, tokenizer, keep_special_tokens=params.keep_special_tokens),
        stop=params.stop,
        min_tokens=params.min_tokens,
        include_stop=params.include_stop,
        keep_special_tokens=params.keep_special_tokens,
    )
    return LiveSample(
        token_ids=[] if sequence is None else sequence.token_ids,
        num_prompt_tokens=0 if sequence is None else sequence.num_prompt_tokens,
        text=text,
        stream=SampleStream(text),
        sequence=sequence,
        sample_index=0 if sequence is None else params.sampling.sample_index + index,
    )


def context_of(prompt: Seq[int], tokenizer: ModelTokenizer, *, keep_special_tokens: bool) -> list[int]:
    """Last tokens of a prompt that have text: they decide how the first word of the output is spelled."""
    looked_at = prompt[-_CONTEXT_TOKENS:]
    context = tokenizer.with_text(looked_at, keep_special_tokens)
    if len(context) < len(looked_at) < len(prompt):  # seldom, as behind a long row of special tokens
        context = tokenizer.with_text(prompt[-_MOST_LOOKED_AT:], keep_special_tokens)[-_CONTEXT_TOKENS:]
    return context


def _is_token_stop(finish: pb.SampleFinish) -> bool:
    return finish.WhichOneof("cause") in ("eos_token_id", "stop_token_id")
