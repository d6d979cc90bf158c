"""What a client asked for, settled: every default filled in, in plain data.

Here the public request message ends; nothing behind it imports its stubs for parameters. What may be asked is
checked in `request_checks`; lengths are settled once the prompt's tokens are counted. No clock, no randomness.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from common.errors import FieldViolation, InvalidRequestError
from common.slot_sampling import SlotSampling
from protos import inference_pb2 as pb
from scheduler_svc.requests.request_checks import ModelLimits, check_request, suppressed_token_ids

__all__ = ["ModelLimits", "RequestParams", "request_digest", "settle_length", "validate"]

_MOST_TIMEOUT_MS = 100 * 365 * 24 * 3600 * 1000  # as good as none, and its deadline still fits int64 nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams:
    """A valid request but for its prompt. `stop_token_ids` and `eos_token_ids` (empty for ignore_eos) end it."""

    request_id: str
    tenant: str
    cache_salt: str
    timeout_ms: int | None
    cancel_on_disconnect: bool
    sampling: SlotSampling  # of the first sample, without the prompt's length: see `slot_sampling`
    seed: int  # uint64
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    eos_token_ids: frozenset[int]
    include_stop: bool
    keep_special_tokens: bool
    want_token_ids: bool
    num_logprobs: int | None
    num_prompt_logprobs: int | None

    def slot_sampling(self, num_prompt_tokens: int) -> SlotSampling:
        """The sampling parameters, with the position until which end and stop tokens are held back."""
        if not self.min_tokens:
            return self.sampling
        return replace(self.sampling, suppressed_until=num_prompt_tokens + self.min_tokens)


def validate(
    request: pb.GenerateRequest,
    limits: ModelLimits,
    *,
    draw_seed: Callable[[], int],
    make_id: Callable[[], str],
) -> RequestParams:
    """Checks and settles a request. `draw_seed` and `make_id` are asked only for what the request leaves open.

    Raises:
        InvalidRequestError: With everything that is wrong with the request, by field.
        FailedPreconditionError: The request needs a tokenizer or a chat template, and the model has none.
    """
    check_request(request, limits)
    seed = request.sampling.seed if request.sampling.HasField("seed") else draw_seed()
    stopping, output = request.stopping, request.output
    sampling = _slot_sampling(request, limits, seed)
    return RequestParams(
        request_id=request.request_id or make_id(),
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        timeout_ms=min(request.timeout_ms, _MOST_TIMEOUT_MS) if request.HasField("timeout_ms") else None,
        cancel_on_disconnect=request.on_disconnect != pb.ON_DISCONNECT_CONTINUE,
        sampling=sampling,
        seed=seed,
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
        min_tokens=stopping.min_tokens,
        stop=tuple(stopping.stop),
        stop_token_ids=frozenset(stopping.stop_token_ids),
        eos_token_ids=frozenset() if stopping.ignore_eos else limits.eos_token_ids,
        include_stop=stopping.include_stop,
        keep_special_tokens=output.keep_special_tokens,
        want_token_ids=output.token_ids,
        num_logprobs=sampling.num_logprobs,
        num_prompt_logprobs=sampling.num_prompt_logprobs,
    )


def _slot_sampling(request: pb.GenerateRequest, limits: ModelLimits, seed: int) -> SlotSampling:
    sampling, output = request.sampling, request.output
    return SlotSampling(
        seed=seed,
        sample_index=sampling.first_sample_index,
        allowed_token_ids=tuple(dict.fromkeys(sampling.allowed_token_ids)) or None,
        suppressed_token_ids=tuple(sorted(suppressed_token_ids(request.stopping, limits))),
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        min_p=sampling.min_p,
        top_k=sampling.top_k if 0 < sampling.top_k < limits.vocab_size else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        num_logprobs=min(output.logprobs, limits.vocab_size) if output.HasField("logprobs") else None,
        num_prompt_logprobs=(
            min(output.prompt_logprobs, limits.vocab_size) if output.HasField("prompt_logprobs") else None
        ),
    )


def settle_length(params: RequestParams, num_prompt_tokens: int, limits: ModelLimits, max_tokens_that_fit: int) -> int:
    """The bound of the output in force, in tokens.

    `max_tokens_that_fit` is the longest prompt and output that the KV memory can hold; while no worker is there,
    that of the workers known last, not 0.

    Raises:
        InvalidRequestError: The lengths can never work, with the numbers that would.
    """
    if num_prompt_tokens == 0:
        raise _refusal("prompt", "is empty: give at least one token")
    longest = min(limits.max_model_len, max_tokens_that_fit)
    room = longest - num_prompt_tokens
    if longest == limits.max_model_len:
        have, remedy = f"the model's context holds {longest:,} tokens, the output included", ""
    else:
        have, remedy = f"the KV memory holds {longest:,} tokens of one request", ", or serve with more KV memory"
    if room < 1:
        fewer = f"shorten it to at most {max(longest - 1, 0):,}"
        raise _refusal("prompt", f"has {num_prompt_tokens:,} tokens; {have}: {fewer}{remedy}")
    for field, wanted in (("max_tokens", params.max_tokens or 1), ("min_tokens", params.min_tokens)):
        if wanted > room:
            behind = f"is {wanted:,} behind a prompt of {num_prompt_tokens:,} tokens"
            raise _refusal(f"stopping.{field}", f"{behind}; {have}: give at most {room:,}{remedy}")
    return params.max_tokens or room


def request_digest(request: pb.GenerateRequest) -> bytes:
    """Equal for two submissions of the same request: all of it counts but its id and its timeout."""
    body = pb.GenerateRequest()
    body.CopyFrom(request)
    body.ClearField("request_id")
    body.ClearField("timeout_ms")
    return hashlib.sha256(body.SerializeToString(deterministic=True)).digest()


def _refusal(field: str, description: str) -> InvalidRequestError:
    return InvalidRequestError.of([FieldViolation(field, description)])
