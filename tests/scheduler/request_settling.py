"""A model's limits, requests to it, and what `validate` says to them."""

from typing import Any

import pytest

from common.bounds_check import check_of
from quire.errors import InvalidRequestError
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.params.prompt_checks import ModelLimits
from scheduler_svc.requests.params.request_params import ValidatedParams, validate

LIMITS = ModelLimits(
    vocab_size=1000,
    max_model_len=256,
    eos_token_ids=frozenset({2, 3}),
    has_tokenizer=True,
    has_chat_template=True,
)


def settled(request: pb.GenerateRequest, limits: ModelLimits = LIMITS) -> ValidatedParams:
    check_of(pb.GenerateRequest.DESCRIPTOR).check(request)  # as the edge does
    return validate(request, limits, draw_seed=lambda: 77, make_id=lambda: "made")


def refused(request: pb.GenerateRequest, limits: ModelLimits = LIMITS) -> dict[str, str]:
    """Descriptions by field, in order."""
    with pytest.raises(InvalidRequestError) as caught:
        settled(request, limits)
    for each in caught.value.violations:
        assert f"{each.field}: {each.description}" in caught.value.message
    return {each.field: each.description for each in caught.value.violations}


def request_of(**parts: Any) -> pb.GenerateRequest:
    """A request with a prompt unless `parts` has one."""
    if not {"text", "chat", "token_ids"} & parts.keys():
        parts["text"] = "Once"
    return pb.GenerateRequest(**parts)
