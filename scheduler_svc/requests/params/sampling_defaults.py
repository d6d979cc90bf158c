"""Sampling parameters that a model recommends, for requests that leave them out.

They are filled in when a request is admitted, and journaled with it, so that a request keeps them whatever is served
later.
"""

from common.sampling_codec import given_numbers
from common.sampling_params import DRAWS_ONLY
from quire.errors import InvalidRequestError
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.params.request_checks import check_sampling_ranges

_NOT_OF_BEAMS = frozenset(DRAWS_ONLY) | {"temperature"}


def check_defaults(defaults: pb.SamplingParams) -> None:
    """Raise ValueError for defaults that a request could not give itself."""
    try:
        check_sampling_ranges(defaults)
    except InvalidRequestError as error:
        raise ValueError(f"its sampling defaults are refused: {error.message}") from error


def with_defaults(request: pb.GenerateRequest, defaults: pb.SamplingParams) -> pb.GenerateRequest:
    """Copy of the request with the defaults filled in; the request itself if no default is missing."""
    recommended = given_numbers(defaults)
    if not recommended:
        return request
    given = given_numbers(request.sampling)
    missing = recommended.keys() - given.keys()
    if request.HasField("beam"):
        missing -= _NOT_OF_BEAMS
    elif {**recommended, **given}.get("temperature") == 0:
        missing -= DRAWS_ONLY.keys()
    if not missing:
        return request
    filled = pb.GenerateRequest()
    filled.CopyFrom(request)
    for name in missing:
        setattr(filled.sampling, name, recommended[name])
    return filled
