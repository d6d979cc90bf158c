"""Checks of a request, field by field, against the ranges that the comments of inference.proto state.

Reads the request and changes nothing; error messages repeat nothing of a bad request but short numbers. Lengths of
strings and lists were checked before, at the edge: see `common.bounds`.
"""

import re

from common.bounds import MOST_SAMPLES
from common.sampling_codec import given_numbers
from common.sampling_params import DRAWS_ONLY, NUMERIC_PARAMS
from common.violations import Violations
from quire.errors import FailedPreconditionError
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.params.prompt_checks import ModelLimits, check_can_tokenize, check_ids, check_prompt
from scheduler_svc.requests.params.structured_output import check_structured_output

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{0,128}")
_PIN_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
MOST_PRIORITY = 1000  # and least, below zero
_MOST_LOGPROBS = 20
_MOST_BIAS = 100.0
_MOST_BEAMS = 64
_MOST_LENGTH_PENALTY = 4.0
_MOST_SAMPLE_INDEX = 2**32 - 1


def check_request(request: pb.GenerateRequest, limits: ModelLimits) -> None:
    """Raise InvalidRequestError with every violation, else FailedPreconditionError if the model lacks a part."""
    violations = Violations()
    _check_names(request, violations)
    kind = request.WhichOneof("prompt")
    if kind is None:
        violations.add("prompt", "is missing: give text, chat or token_ids")
    check_prompt(request, kind, limits, violations)
    _check_sampling(request.sampling, limits, violations)
    _check_stopping(request.stopping, limits, violations)
    _check_output(request.output, violations)
    _check_samples(request, violations)
    if request.HasField("beam"):
        _check_beam(request, violations)
    if request.HasField("structured_output"):
        check_structured_output(request, violations)
    _check_choice_is_left(request, limits, violations)
    violations.raise_if_any()
    check_can_tokenize(kind, limits)
    if request.HasField("structured_output"):
        _check_can_constrain(limits)
    if not limits.has_tokenizer and request.stopping.stop:
        raise FailedPreconditionError("the model has no tokenizer and so no text: use stop_token_ids instead of stop")


def _check_can_constrain(limits: ModelLimits) -> None:
    if not limits.has_tokenizer:
        raise FailedPreconditionError("the model has no tokenizer and so no text: leave structured_output out")
    if not limits.eos_token_ids:
        raise FailedPreconditionError(
            "the model has no end-of-sequence token, which ends a structured output: leave structured_output out"
        )


def check_sampling_ranges(sampling: pb.SamplingParams) -> None:
    """Raise InvalidRequestError for values that no model accepts."""
    violations = Violations()
    _check_ranges(sampling, violations)
    violations.raise_if_any()


def check_prefix(request: pb.PinPrefixRequest, limits: ModelLimits) -> None:
    """Check a prefix as `check_request` does a request."""
    violations = Violations()
    if not _PIN_NAME.fullmatch(request.name):
        violations.add("name", "is no name of a pin: give 1 to 128 characters of A-Z a-z 0-9 . _ : -")
    kind = request.WhichOneof("prefix")
    if kind is None:
        violations.add("prefix", "is missing: give text, chat or token_ids")
    check_prompt(request, kind, limits, violations)
    violations.raise_if_any()
    check_can_tokenize(kind, limits)


def suppressed_token_ids(stopping: pb.StoppingParams, limits: ModelLimits) -> frozenset[int]:
    """Tokens that `min_tokens` suppresses."""
    if not stopping.min_tokens:
        return frozenset()
    ends = frozenset(stopping.stop_token_ids)
    return ends if stopping.ignore_eos else ends | limits.eos_token_ids


def _check_names(request: pb.GenerateRequest, violations: Violations) -> None:
    if not _REQUEST_ID.fullmatch(request.request_id):
        violations.add(
            "request_id", "is not a request id: give at most 128 characters of A-Z a-z 0-9 . _ : - or leave it out"
        )
    if not -MOST_PRIORITY <= request.priority <= MOST_PRIORITY:
        violations.add(
            "priority", f"is {request.priority:,}: give a number from -{MOST_PRIORITY:,} to {MOST_PRIORITY:,}"
        )
    if request.HasField("timeout_ms") and request.timeout_ms < 1:
        violations.add("timeout_ms", f"is {request.timeout_ms}: give at least 1, or leave it out for no bound")
    if request.on_disconnect not in pb.OnDisconnect.values():
        violations.add("on_disconnect", f"is {request.on_disconnect}, which is unknown: CANCEL is 1, CONTINUE 2")


def _check_ranges(sampling: pb.SamplingParams, violations: Violations) -> None:
    given = given_numbers(sampling)
    for each in NUMERIC_PARAMS:
        if each.name in given and not each.allows(given[each.name]):
            remedy = f"give {each.range}" + (", or leave it out" if each.default is None else "")
            violations.add(f"sampling.{each.name}", f"is {given[each.name]:g}: {remedy}")


def _check_sampling(sampling: pb.SamplingParams, limits: ModelLimits, violations: Violations) -> None:
    _check_ranges(sampling, violations)
    _check_bias(sampling, limits, violations)
    check_ids("sampling.allowed_token_ids", sampling.allowed_token_ids, limits, violations)


def _check_bias(sampling: pb.SamplingParams, limits: ModelLimits, violations: Violations) -> None:
    field = "sampling.logit_bias"
    bias = sorted(sampling.logit_bias.items())
    violations.add_each(
        (f"{field}[{token_id}]", f"is no token id: give one from 0 to {limits.vocab_size - 1}")
        for token_id, _ in bias
        if not 0 <= token_id < limits.vocab_size
    )
    violations.add_each(
        (f"{field}[{token_id}]", f"is {value:g}: give a number from -100 to 100")
        for token_id, value in bias
        if not -_MOST_BIAS <= value <= _MOST_BIAS
    )


def _check_stopping(stopping: pb.StoppingParams, limits: ModelLimits, violations: Violations) -> None:
    if stopping.HasField("max_tokens"):
        if stopping.max_tokens < 1:
            violations.add("stopping.max_tokens", "is 0: give at least 1, or leave it out")
        elif stopping.min_tokens > stopping.max_tokens:
            violations.add(
                "stopping.min_tokens",
                f"is {stopping.min_tokens:,}, more than max_tokens ({stopping.max_tokens:,}): lower it or raise that",
            )
    violations.add_each(
        (f"stopping.stop[{i}]", "is empty, which would end every output at once: leave it out")
        for i, each in enumerate(stopping.stop)
        if not each
    )
    check_ids("stopping.stop_token_ids", stopping.stop_token_ids, limits, violations)


def _check_output(output: pb.OutputParams, violations: Violations) -> None:
    for field in ("logprobs", "prompt_logprobs"):
        wanted = getattr(output, field)
        if wanted > _MOST_LOGPROBS:
            violations.add(f"output.{field}", f"is {wanted:,}: give at most {_MOST_LOGPROBS}")


def _check_samples(request: pb.GenerateRequest, violations: Violations) -> None:
    sampling = request.sampling
    n = sampling.n if sampling.HasField("n") else 1
    best_of = sampling.best_of if sampling.HasField("best_of") else n
    if not 1 <= n <= MOST_SAMPLES:
        violations.add("sampling.n", f"is {n:,}: give 1 to {MOST_SAMPLES}")
    elif request.HasField("beam"):
        return  # see _check_beam
    elif not n <= best_of <= MOST_SAMPLES:
        violations.add("sampling.best_of", f"is {best_of:,}: give {n}, which is n, to {MOST_SAMPLES}")
    elif best_of > 1 and sampling.HasField("temperature") and sampling.temperature == 0:
        field = "n" if best_of == n else "best_of"
        violations.add(
            f"sampling.{field}", f"is {best_of} with temperature 0, which makes all alike: raise that, or leave it out"
        )
    elif sampling.first_sample_index + best_of - 1 > _MOST_SAMPLE_INDEX:
        violations.add("sampling.first_sample_index", f"leaves no index for {best_of} samples: lower it")


def _check_beam(request: pb.GenerateRequest, violations: Violations) -> None:
    beam, sampling = request.beam, request.sampling
    if not 2 <= beam.beam_width <= _MOST_BEAMS:
        violations.add("beam.beam_width", f"is {beam.beam_width:,}: give 2 to {_MOST_BEAMS}, or ask for no beam search")
    elif beam.beam_width < sampling.n <= MOST_SAMPLES:
        violations.add("sampling.n", f"is {sampling.n}: a search of beam_width {beam.beam_width} has no more to give")
    if not abs(beam.length_penalty) <= _MOST_LENGTH_PENALTY:
        violations.add(
            "beam.length_penalty",
            f"is {beam.length_penalty:g}: give a number from {-_MOST_LENGTH_PENALTY:g} to {_MOST_LENGTH_PENALTY:g}",
        )
    if beam.early_stopping not in pb.EarlyStopping.values():
        violations.add("beam.early_stopping", f"is {beam.early_stopping}: FALSE is 1, TRUE 2, NEVER 3")
    for field, default in {"temperature": 0, "first_sample_index": 0, **DRAWS_ONLY}.items():
        value = getattr(sampling, field)
        if value and value != default:
            violations.add(f"sampling.{field}", f"is {value:g}: a beam search draws nothing, so leave it out")
    if sampling.HasField("best_of"):
        violations.add("sampling.best_of", f"is {sampling.best_of:,}: a beam search draws nothing, so leave it out")
    if request.stopping.stop:
        violations.add("stopping.stop", "cannot end a beam search: use stop_token_ids, or ask for no beam search")


def _check_choice_is_left(request: pb.GenerateRequest, limits: ModelLimits, violations: Violations) -> None:
    """Require a token that is allowed while `min_tokens` suppresses those that end the output."""
    suppressed = suppressed_token_ids(request.stopping, limits)
    allowed = set(request.sampling.allowed_token_ids)
    if allowed and allowed <= suppressed:
        violations.add(
            "sampling.allowed_token_ids",
            "allows only tokens that end the output, which min_tokens holds back: allow more, or drop min_tokens",
        )
    elif len(suppressed) >= limits.vocab_size:
        violations.add("stopping.stop_token_ids", "is the whole vocabulary, which min_tokens holds back: drop either")
