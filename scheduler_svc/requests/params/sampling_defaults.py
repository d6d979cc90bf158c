"""Sampling parameters that a model recommends, for requests that leave them out.

They are filled in when a request is admitted, and journaled with it, so that a request keeps them whatever is served
later.
"""

from quire.errors import InvalidRequestError
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.params.request_checks import check_sampling_ranges

_FIELDS = tuple(pb.SamplingDefaults.DESCRIPTOR.fields_by_name)
_OF_BEAMS = ("repetition_penalty",)
_OF_DRAWING = ("top_k", "top_p", "min_p")


def check_defaults(defaults: pb.SamplingDefaults) -> None:
    """Raise ValueError for defaults that a request could not give itself."""
    params = pb.SamplingParams()
    _fill(params, defaults, _FIELDS)
    try:
        check_sampling_ranges(params)
    except InvalidRequestError as error:
        raise ValueError(f"its sampling defaults are refused: {error.message}") from error


def with_defaults(request: pb.GenerateRequest, defaults: pb.SamplingDefaults) -> pb.GenerateRequest:
    """Copy of the request with the defaults filled in; the request itself if no default is missing."""
    fields: tuple[str, ...] = _FIELDS
    if request.HasField("beam"):
        fields = _OF_BEAMS
    sampling = request.sampling
    temperature = sampling.temperature if sampling.HasField("temperature") else defaults.temperature
    is_greedy = temperature == 0 and (sampling.HasField("temperature") or defaults.HasField("temperature"))
    missing = [
        each
        for each in fields
        if defaults.HasField(each)  # type: ignore[arg-type]
        and not sampling.HasField(each)  # type: ignore[arg-type]
        and not (is_greedy and each in _OF_DRAWING)
    ]
    if not missing:
        return request
    filled = pb.GenerateRequest()
    filled.CopyFrom(request)
    _fill(filled.sampling, defaults, missing)
    return filled


def _fill(sampling: pb.SamplingParams, defaults: pb.SamplingDefaults, fields: "tuple[str, ...] | list[str]") -> None:
    for each in fields:
        if defaults.HasField(each):  # type: ignore[arg-type]
            setattr(sampling, each, getattr(defaults, each))
