"""Random requests: each is refused in words, or satisfies every limit."""

import math
import re
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from common.bounds_check import check_of
from quire.errors import FailedPreconditionError, InvalidRequestError
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.params.prompt_checks import ModelLimits
from scheduler_svc.requests.params.request_params import (
    ValidatedParams,
    request_digest,
    settle_length,
    validate,
)


def mostly(usual: st.SearchStrategy[Any], *unusual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw the usual value most of the time, so that enough requests pass that have many fields."""
    return st.integers(0, 11).flatmap(lambda n: st.one_of(unusual) if n == 0 else usual)


INT32 = st.integers(-(2**31), 2**31 - 1)
UINT32 = st.integers(0, 2**32 - 1)
FLOAT = mostly(st.floats(0.125, 1, width=32), st.floats(width=32))
SMALL = mostly(st.integers(1, 20), UINT32)
TEXT = mostly(st.text(min_size=1, max_size=20), st.text(min_size=120, max_size=300), st.just(""))
IDS = mostly(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.lists(INT32), st.lists(st.just(1), min_size=258))
LIMITS = st.builds(
    ModelLimits,
    vocab_size=mostly(st.integers(10, 50), st.integers(1, 9)),
    max_model_len=mostly(st.integers(30, 300), st.integers(2, 29)),
    eos_token_ids=st.frozensets(st.integers(0, 5), max_size=3),
    has_tokenizer=mostly(st.just(True), st.just(False)),
    has_chat_template=st.booleans(),
)


def message_of(kind: Any, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Messages with any of the fields absent."""
    return st.fixed_dictionaries({}, optional=fields).map(lambda present: kind(**present))


SAMPLING = message_of(
    pb.SamplingParams,
    temperature=FLOAT,
    top_k=SMALL,
    top_p=FLOAT,
    min_p=FLOAT,
    repetition_penalty=FLOAT,
    presence_penalty=FLOAT,
    frequency_penalty=FLOAT,
    logit_bias=st.dictionaries(mostly(st.integers(0, 9), INT32), FLOAT, max_size=4),
    allowed_token_ids=IDS,
    seed=st.integers(0, 2**64 - 1),
    first_sample_index=UINT32,
    n=mostly(st.integers(1, 4), UINT32),
    best_of=mostly(st.integers(4, 128), UINT32),
)
SEARCHED = message_of(
    pb.SamplingParams,
    temperature=mostly(st.just(0.0), FLOAT),
    top_p=mostly(st.just(1.0), FLOAT),
    repetition_penalty=FLOAT,
    allowed_token_ids=IDS,
    n=mostly(st.integers(1, 4), UINT32),
    best_of=mostly(st.none(), UINT32),
)
BEAM = message_of(
    pb.BeamParams,
    beam_width=mostly(st.integers(2, 64), UINT32),
    length_penalty=mostly(st.floats(-4, 4, width=32), st.floats(width=32)),
    early_stopping=mostly(st.integers(0, 3), INT32),
)
STOPPING = message_of(
    pb.StoppingParams,
    max_tokens=mostly(st.integers(10, 20), UINT32),
    min_tokens=mostly(st.integers(0, 10), UINT32),
    stop=mostly(st.lists(TEXT, max_size=3), st.lists(TEXT, max_size=20)),
    stop_token_ids=IDS,
    ignore_eos=st.booleans(),
    include_stop=st.booleans(),
)
OUTPUT = message_of(
    pb.OutputParams,
    token_ids=st.booleans(),
    logprobs=SMALL,
    prompt_logprobs=SMALL,
    keep_special_tokens=st.booleans(),
)
CHAT = message_of(pb.ChatPrompt, messages=st.lists(message_of(pb.ChatMessage, role=TEXT, content=TEXT), max_size=4))
PROMPT: st.SearchStrategy[dict[str, Any]] = mostly(
    st.one_of(
        st.builds(dict, text=TEXT),
        st.builds(dict, chat=CHAT),
        st.builds(dict, token_ids=st.builds(pb.TokenIds, ids=IDS)),
    ),
    st.builds(dict),
)
DECODING: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries({}, optional={"sampling": SAMPLING}),
    st.fixed_dictionaries({"beam": BEAM}, optional={"sampling": SEARCHED}),
    st.fixed_dictionaries({"beam": BEAM, "sampling": SAMPLING}),
)
ANY_REQUEST = st.builds(
    lambda prompt, decoding, other: pb.GenerateRequest(**prompt, **decoding, **other),
    PROMPT,
    DECODING,
    st.fixed_dictionaries(
        {},
        optional={
            "request_id": mostly(st.just("id-1"), TEXT),
            "stopping": STOPPING,
            "output": OUTPUT,
            "tenant": TEXT,
            "cache_salt": TEXT,
            "timeout_ms": mostly(st.integers(1, 2**63 - 1), st.integers(-(2**63), 0)),
            "on_disconnect": mostly(st.integers(0, 2), INT32),
            "priority": mostly(st.integers(-1000, 1000), INT32),
        },
    ),
)
fast = settings(max_examples=800)


def is_field_path(path: str) -> bool:
    """True if the path leads to a field of a request, or to the choice of its prompt."""
    kind: Descriptor | None = pb.GenerateRequest.DESCRIPTOR
    for name in re.sub(r"\[[^]]*\]", "", path).split("."):
        if kind is None or name not in {*kind.fields_by_name, *kind.oneofs_by_name}:
            return False
        kind = kind.fields_by_name[name].message_type if name in kind.fields_by_name else None
    return True


def settled(request: pb.GenerateRequest, limits: ModelLimits) -> ValidatedParams | None:
    """Settle a request; None if it was refused correctly."""
    before = request.SerializeToString(deterministic=True)
    request_digest(request)
    try:
        check_of(pb.GenerateRequest.DESCRIPTOR).check(request)  # as the edge does
        return validate(request, limits, draw_seed=lambda: 1, make_id=lambda: "made")
    except InvalidRequestError as error:
        assert 1 <= len(error.violations) <= 10
        assert all(is_field_path(each.field) for each in error.violations), error.violations
        assert len(error.message) < 3000
    except FailedPreconditionError as error:
        assert error.message
    finally:
        assert request.SerializeToString(deterministic=True) == before
    return None


def check_within_limits(params: ValidatedParams, limits: ModelLimits) -> None:
    sampling = params.sampling
    assert 1 <= len(params.request_id) <= 128 >= max(len(params.tenant), len(params.cache_salt))
    assert params.timeout_ms is None or params.timeout_ms >= 1
    assert 0 <= sampling.temperature <= 100
    assert 0 < sampling.top_p <= 1
    assert 0 <= sampling.min_p <= 1
    assert 0.009 < sampling.repetition_penalty <= 100
    assert abs(sampling.presence_penalty) <= 2 >= abs(sampling.frequency_penalty)
    assert sampling.top_k is None or 1 <= sampling.top_k < limits.vocab_size
    assert all(math.isfinite(value) and abs(value) <= 100 for _, value in sampling.logit_bias)
    ids = {*(sampling.allowed_token_ids or ()), *dict(sampling.logit_bias), *params.stop_token_ids}
    assert ids <= set(range(limits.vocab_size))
    assert set(sampling.allowed_token_ids or range(limits.vocab_size)) - set(sampling.suppressed_token_ids)
    assert len(params.stop) <= 16
    assert all(1 <= len(each.encode()) <= 256 for each in params.stop)
    assert not params.stop or limits.has_tokenizer
    assert params.max_tokens is None or params.max_tokens >= max(1, params.min_tokens)
    assert all((each or 0) <= 20 for each in (params.sampling.num_logprobs, params.sampling.num_prompt_logprobs))
    check_samples_within_limits(params)


def check_samples_within_limits(params: ValidatedParams) -> None:
    assert 1 <= params.num_samples <= params.num_sequences <= 128
    if params.beam is not None:
        assert 2 <= params.beam.beam_width == params.num_sequences <= 64
        assert not params.stop
        assert (params.sampling.top_k, params.sampling.top_p, params.sampling.min_p) == (None, 1, 0)
        assert params.beam_params(params.max_tokens or 300).num_return == params.num_samples  # which checks itself
    elif params.num_sequences > 1:
        assert params.sampling.temperature > 0
    last = params.sequence_sampling(1, params.num_sequences - 1).sample_index
    assert last == params.sampling.sample_index + (0 if params.beam else params.num_sequences - 1) < 2**32


@pytest.mark.long
@fast
@given(ANY_REQUEST, LIMITS)
def test_any_request_is_refused_in_words_or_satisfies_every_limit(
    request: pb.GenerateRequest, limits: ModelLimits
) -> None:
    params = settled(request, limits)
    if params is not None:
        check_within_limits(params, limits)


@pytest.mark.long
@fast
@given(ANY_REQUEST, LIMITS, st.integers(0, 2**16), st.binary(max_size=3), st.integers(0, 3))
def test_bytes_damaged_on_their_way_are_refused_in_words_or_satisfy_every_limit(
    sent: pb.GenerateRequest, limits: ModelLimits, place: int, put_in: bytes, num_left_out: int
) -> None:
    data = sent.SerializeToString()
    place %= len(data) + 1
    try:
        request = pb.GenerateRequest.FromString(data[:place] + put_in + data[place + num_left_out :])
    except DecodeError:
        return
    params = settled(request, limits)
    if params is not None:
        check_within_limits(params, limits)


@fast
@given(
    max_tokens=st.one_of(st.none(), st.integers(1, 400)),
    min_tokens=st.integers(0, 400),
    num_prompt_tokens=st.integers(0, 400),
    max_model_len=st.integers(2, 300),
    fit=st.integers(1, 400),
)
def test_settled_lengths_always_fit_and_refusals_are_never_in_vain(
    max_tokens: int | None, min_tokens: int, num_prompt_tokens: int, max_model_len: int, fit: int
) -> None:
    limits = ModelLimits(
        vocab_size=9,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(),
        has_tokenizer=True,
        has_chat_template=True,
    )
    stopping = pb.StoppingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens or min_tokens))
    params = settled(pb.GenerateRequest(text="x", stopping=stopping), limits)
    assert params is not None
    room = min(max_model_len, fit) - num_prompt_tokens
    needed = max(max_tokens or 1, params.min_tokens)
    try:
        bound = settle_length(params, num_prompt_tokens, limits, fit)
    except InvalidRequestError:
        assert num_prompt_tokens == 0 or needed > room
    else:
        assert num_prompt_tokens > 0
        assert needed <= bound <= room
        assert bound == (max_tokens or room)
