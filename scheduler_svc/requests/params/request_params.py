"""Parameters of a request in plain data, with every default filled in.

The public request message ends here; no later module imports its stubs for parameters. `request_checks` checks the
values; lengths are settled once the prompt's tokens are counted. No clock, no randomness.
"""

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from common.arrays import INT32_BYTES
from common.sampling_codec import given_numbers
from common.sampling_params import SequenceSampling
from common.violations import refusal_of
from quire.errors import CONTEXT_LENGTH_EXCEEDED, OverloadedError
from quire.v1 import inference_pb2 as pb
from scheduler_svc.core.beam_search import BeamSearchParams
from scheduler_svc.requests.params.prompt_checks import SERVE_WITH_MORE_MEMORY, ModelLimits, context_of, logprob_bytes
from scheduler_svc.requests.params.request_checks import MOST_PRIORITY, check_request, suppressed_token_ids
from scheduler_svc.requests.params.structured_output import grammar_of

EARLY_STOPPING: dict[int, "bool | Literal['never']"] = {
    pb.EARLY_STOPPING_UNSPECIFIED: False,
    pb.EARLY_STOPPING_FALSE: False,
    pb.EARLY_STOPPING_TRUE: True,
    pb.EARLY_STOPPING_NEVER: "never",
}
# Log-probabilities of a request's whole output stand in one entry of the journal when it is restated. Redis takes no
# value above 512 MiB: the entry would be tried for ever, and every request of the journal wait behind it.
_MOST_LOGPROB_BYTES = 256 * 1024 * 1024
MOST_HISTORY_BYTES = 64 << 20  # of a request's sequences; a message to a worker, with block tables, has 128 MiB
_PINNED_RETRY_S = 5.0  # when a client unpins is not known
_NO_TOKENS: frozenset[int] = frozenset()  # one for all requests


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedParams:
    """Valid request without its prompt. `stop_token_ids` and `eos_token_ids` (empty for ignore_eos) end it."""

    request_id: str
    tenant: str
    cache_salt: str
    priority: int  # lower is served first
    annotation: bytes = b""
    timeout_ms: int | None
    cancel_on_disconnect: bool
    sampling: SequenceSampling  # of the first sample, without the prompt's length: see `sequence_sampling`
    seed: int  # uint64
    num_samples: int  # that come back
    num_sequences: int  # that are drawn, or live beams at most
    beam: BeamSearchParams | None  # without the bound of the output: see `beam_params`
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    eos_token_ids: frozenset[int]
    include_stop: bool
    keep_special_tokens: bool

    @property
    def is_ranked(self) -> bool:
        """True if more samples are drawn than come back."""
        return self.beam is None and self.num_sequences > self.num_samples

    def sequence_sampling(self, num_prompt_tokens: int, index: int = 0) -> SequenceSampling:
        """Sampling of sample `index`, with the position until which end and stop tokens are suppressed."""
        sampling = self.sampling
        if self.min_tokens:
            sampling = replace(sampling, suppressed_until=num_prompt_tokens + self.min_tokens)
        if index and self.beam is None:
            sampling = replace(sampling, sample_index=sampling.sample_index + index)
        if self.is_ranked and sampling.num_logprobs is None:
            sampling = replace(sampling, num_logprobs=0)
        return sampling

    def beam_params(self, max_tokens: int) -> BeamSearchParams:
        """Parameters of the search, with the bound of the output in force; only with `beam`."""
        assert self.beam is not None
        return replace(self.beam, max_tokens=max_tokens)


def validate(
    request: pb.GenerateRequest,
    limits: ModelLimits,
    *,
    draw_seed: Callable[[], int],
    make_id: Callable[[], str],
) -> ValidatedParams:
    """Check and settle a request. `draw_seed` and `make_id` are called only for fields that the request leaves out.

    Raises:
        InvalidRequestError: With everything that is wrong with the request, by field.
        FailedPreconditionError: The request needs a tokenizer or a chat template, and the model has none.
    """
    check_request(request, limits)
    return settle(request, limits, draw_seed=draw_seed, make_id=make_id)


def settle(
    request: pb.GenerateRequest,
    limits: ModelLimits,
    *,
    draw_seed: Callable[[], int],
    make_id: Callable[[], str],
) -> ValidatedParams:
    """Settle a request that was found valid before, as `validate` does."""
    seed = request.sampling.seed if request.sampling.HasField("seed") else draw_seed()
    stopping, output = request.stopping, request.output
    sampling = _sequence_sampling(request, limits, seed)
    num_samples = request.sampling.n or 1
    stop_token_ids = frozenset(stopping.stop_token_ids) if stopping.stop_token_ids else _NO_TOKENS
    eos_token_ids = _NO_TOKENS if stopping.ignore_eos else limits.eos_token_ids
    return ValidatedParams(
        request_id=request.request_id or make_id(),
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        priority=max(-MOST_PRIORITY, min(MOST_PRIORITY, request.priority)),  # journals once had any
        annotation=request.annotation,
        timeout_ms=request.timeout_ms if request.HasField("timeout_ms") else None,
        cancel_on_disconnect=request.on_disconnect != pb.ON_DISCONNECT_CONTINUE,
        sampling=sampling,
        seed=seed,
        num_samples=num_samples,
        num_sequences=num_sequences_of(request),
        beam=_beam(request.beam, eos_token_ids | stop_token_ids, num_samples) if request.HasField("beam") else None,
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
        min_tokens=stopping.min_tokens,
        stop=tuple(stopping.stop),
        stop_token_ids=stop_token_ids,
        eos_token_ids=eos_token_ids,
        include_stop=stopping.include_stop,
        keep_special_tokens=output.keep_special_tokens,
    )


def num_sequences_of(request: pb.GenerateRequest) -> int:
    """Number of sequences that are drawn, or of live beams at most."""
    return request.beam.beam_width or request.sampling.best_of or request.sampling.n or 1


def _sequence_sampling(request: pb.GenerateRequest, limits: ModelLimits, seed: int) -> SequenceSampling:
    sampling, output = request.sampling, request.output
    numbers, grammar = given_numbers(sampling), grammar_of(request.structured_output)
    suppressed = suppressed_token_ids(request.stopping, limits)
    if (top_k := numbers.get("top_k")) is not None and top_k >= limits.vocab_size:
        del numbers["top_k"]
    return SequenceSampling(
        seed=seed,
        sample_index=sampling.first_sample_index,
        grammar=grammar,
        forces_text=bool(grammar) and not suppressed and not _sees_each_token(request),
        allowed_token_ids=array("i", dict.fromkeys(sampling.allowed_token_ids)) or None,
        suppressed_token_ids=tuple(sorted(suppressed)),
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        num_logprobs=min(output.logprobs, limits.vocab_size) if output.HasField("logprobs") else None,
        num_prompt_logprobs=(
            min(output.prompt_logprobs, limits.vocab_size) if output.HasField("prompt_logprobs") else None
        ),
        **numbers,
    )


def _sees_each_token(request: pb.GenerateRequest) -> bool:
    """True if each token must come by itself: its text may end the output, or something other than the grammar bars it.

    Log-probabilities, by which `best_of` ranks as well, are those of sampled tokens.
    """
    sampling = request.sampling
    is_ranked = request.HasField("beam") or sampling.best_of > (sampling.n or 1)
    return bool(request.stopping.stop or sampling.allowed_token_ids) or request.output.HasField("logprobs") or is_ranked


def _beam(beam: pb.BeamParams, end_token_ids: frozenset[int], num_return: int) -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=beam.beam_width,
        max_tokens=1,  # until `ValidatedParams.beam_params`
        eos_token_ids=end_token_ids,
        num_return=num_return,
        length_penalty=beam.length_penalty if beam.HasField("length_penalty") else 1.0,
        early_stopping=EARLY_STOPPING[beam.early_stopping],
    )


def settle_length(
    params: ValidatedParams,
    num_prompt_tokens: int,
    limits: ModelLimits,
    max_tokens_that_fit: int,
    *,
    longest_prompt_that_fits: Callable[[], int] | None = None,
    max_sequences_that_fit: int = 1,
    num_pinned_blocks: int = 0,
    max_tokens_without_pins: int = 0,
) -> int:
    """Bound of the output in force, in tokens.

    `max_tokens_that_fit` is the longest prompt and output that the KV memory can hold for each of the sequences of the
    request, which share the prompt; 0 if it cannot hold so many, but `max_sequences_that_fit`. With a prompt of
    `longest_prompt_that_fits` each would have room for one token (None: with one token less than the first); it is
    called if the prompt is too long. All three are what is left beside `num_pinned_blocks`; `max_tokens_without_pins`
    is the first without them.

    Raises:
        InvalidRequestError: The lengths can never work, with the numbers that would.
        OverloadedError: They would work if nothing were pinned.
    """
    if num_prompt_tokens == 0:
        raise refusal_of("prompt", "is empty: give at least one token")
    longest = min(limits.max_model_len, max_tokens_that_fit)
    room = longest - num_prompt_tokens
    if room < 1 and longest_prompt_that_fits is not None:  # a shorter prompt leaves more blocks to share out
        longest = min(limits.max_model_len, longest_prompt_that_fits() + 1)
    num_needed = num_prompt_tokens + max(params.max_tokens or 1, params.min_tokens)
    if longest < num_needed <= min(limits.max_model_len, max_tokens_without_pins):
        raise OverloadedError(
            f"the KV memory holds {longest:,} tokens of this request beside {num_pinned_blocks:,} blocks of pinned "
            f"prefixes, and it needs {num_needed:,}: unpin some, or come back later",
            _PINNED_RETRY_S,
        )
    which, num_sequences = _width(params)
    more_memory = f"or {SERVE_WITH_MORE_MEMORY}"
    if num_pinned_blocks:
        more_memory = f"unpin prefixes, which hold {num_pinned_blocks:,} blocks, {more_memory}"
    if longest == limits.max_model_len:
        have, remedy = context_of(limits), ""
    elif num_sequences == 1:
        have, remedy = f"the KV memory holds {longest:,} tokens of one request", f", {more_memory}"
    else:
        have = f"the KV memory holds {num_sequences} sequences of {longest:,} tokens each that share this prompt"
        remedy = f", lower {which.rpartition('.')[2]}, {more_memory}"
    if longest <= 1 and num_sequences > 1:
        raise refusal_of(
            which, f"is {num_sequences}, more than run at once on a worker: give at most {max_sequences_that_fit:,}"
        )
    if room < 1:
        fewer = f"shorten it to at most {max(longest - 1, 0):,}"
        too_long = f"the prompt is too long: {num_prompt_tokens:,} tokens; {have}: {fewer}{remedy}"
        raise refusal_of("prompt", too_long, CONTEXT_LENGTH_EXCEEDED)
    for field, wanted in (("max_tokens", params.max_tokens or 1), ("min_tokens", params.min_tokens)):
        if wanted > room:
            behind = f"is {wanted:,} behind a prompt of {num_prompt_tokens:,} tokens"
            fewer = f"give at most {room:,}"
            raise refusal_of(f"stopping.{field}", f"{behind}; {have}: {fewer}{remedy}", CONTEXT_LENGTH_EXCEEDED)
    most = _most_tokens_with_logprobs(params, limits.max_model_len)
    if (wanted := max(params.max_tokens or 1, params.min_tokens)) > most:
        fewer = f"more than can be kept: lower it, or give max_tokens of at most {most:,}"
        if params.sampling.num_logprobs is None:
            ranked = f"is {num_sequences}, which are ranked by the log-probabilities of {wanted:,} tokens each"
            raise refusal_of(which, f"{ranked}, {fewer}")
        asked = f"is {params.sampling.num_logprobs} for {num_sequences} sequences of {wanted:,} tokens each"
        raise refusal_of("output.logprobs", f"{asked}, {fewer}")
    return params.max_tokens or min(room, most)


def _most_tokens_with_logprobs(params: ValidatedParams, most: int) -> int:
    """Longest output, of at most `most` tokens, whose log-probabilities fit into one entry of the journal."""
    num_top = params.sequence_sampling(0).num_logprobs
    if num_top is None:
        return most
    # Of a beam search the candidates of each step are kept, up to two for each beam.
    num_rows = params.num_sequences if params.beam is None else 2 * params.num_sequences
    return min(most, _MOST_LOGPROB_BYTES // (num_rows * logprob_bytes(num_top)))


def bound_by_step(params: ValidatedParams, num_prompt_tokens: int, max_tokens: int) -> int:
    """Bound of the output by what a step carries: with penalties or a grammar the whole context of each sequence.

    Raises InvalidRequestError if it carries not so many, so long ones.
    """
    if not params.sampling.needs_history:
        return max_tokens
    which, num_sequences = _width(params)
    most_tokens = MOST_HISTORY_BYTES // INT32_BYTES
    room = most_tokens // num_sequences - num_prompt_tokens
    num_needed = max(params.max_tokens or 1, params.min_tokens)
    if num_needed > room:
        num_tokens = num_prompt_tokens + num_needed
        raise refusal_of(
            which,
            f"is {num_sequences} for {num_tokens:,} tokens of prompt and output, with penalties or a structured "
            f"output, which take the whole context of each to the worker: give at most {most_tokens // num_tokens:,}, "
            f"or at most {most_tokens // num_sequences:,} tokens",
        )
    return min(max_tokens, room)


def request_digest(request: pb.GenerateRequest) -> bytes:
    """Digest of a request, equal for two submissions of it: every field counts but its id and its timeout."""
    body = pb.GenerateRequest()
    body.CopyFrom(request)
    body.ClearField("request_id")
    body.ClearField("timeout_ms")
    return hashlib.sha256(body.SerializeToString(deterministic=True)).digest()


def _width(params: ValidatedParams) -> tuple[str, int]:
    """Field that sets the number of sequences of the request, and the number."""
    if params.beam is not None:
        return "beam.beam_width", params.num_sequences
    return ("sampling.best_of" if params.is_ranked else "sampling.n"), params.num_sequences
