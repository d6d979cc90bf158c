"""Served model, as the first worker described it: limits, tokenizer, names.

One scheduler serves one model at a time; workers of another fingerprint are refused.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from quire.parsing.answer_format import AnswerFormat
from quire.v1 import inference_pb2 as pb
from quire.v1 import worker_pb2
from scheduler_svc.requests.params.prompt_checks import ModelLimits
from scheduler_svc.requests.params.sampling_defaults import check_defaults
from scheduler_svc.text.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Properties of the model that all its requests share."""

    name: str
    fingerprint: str
    architecture: str
    dtype: str
    limits: ModelLimits
    tokenizer: ModelTokenizer | None
    tokenizer_fingerprint: str
    sampling_defaults: pb.SamplingParams = field(default_factory=pb.SamplingParams)

    def to_pb(self) -> pb.GetModelResponse:
        """Answer of GetModel."""
        format = AnswerFormat() if self.tokenizer is None else self.tokenizer.answer_format
        return pb.GetModelResponse(
            name=self.name,
            fingerprint=self.fingerprint,
            architecture=self.architecture,
            dtype=self.dtype,
            max_model_len=self.limits.max_model_len,
            vocab_size=self.limits.vocab_size,
            eos_token_ids=sorted(self.limits.eos_token_ids),
            has_tokenizer=self.limits.has_tokenizer,
            has_chat_template=self.limits.has_chat_template,
            sampling_defaults=self.sampling_defaults,
            tool_parser=format.tool_parser or "",
            reasoning_parser=format.reasoning_parser or "",
        )


def served_model(
    description: worker_pb2.DescribeResponse, known: ServedModel | None, tokenizer: ModelTokenizer | None
) -> ServedModel:
    """Model of a worker, or `known` if it is the same; a tokenizer that one of them lacks is the other's.

    `tokenizer`: made of the worker's files. Raises ValueError if the sampling defaults are out of range, or, with the
    difference, if the worker describes the known model otherwise than the worker that brought it.
    """
    info = description.model
    check_defaults(info.sampling_defaults)
    if known is not None and known.fingerprint == info.fingerprint:
        _check_same(description, known)
        if known.tokenizer is not None or not description.HasField("tokenizer"):
            return known
        brought = served_model(description, None, tokenizer)
        limits = replace(brought.limits, max_model_len=known.limits.max_model_len)
        return replace(
            known, limits=limits, tokenizer=brought.tokenizer, tokenizer_fingerprint=brought.tokenizer_fingerprint
        )
    return ServedModel(
        name=info.name,
        fingerprint=info.fingerprint,
        architecture=info.architecture,
        dtype=info.dtype,
        limits=ModelLimits(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            eos_token_ids=frozenset(info.eos_token_ids),
            has_tokenizer=tokenizer is not None,
            has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
            longest_token_chars=0 if tokenizer is None else tokenizer.longest_token_chars,
        ),
        tokenizer=tokenizer,
        tokenizer_fingerprint="" if tokenizer is None else description.tokenizer.fingerprint,
        sampling_defaults=info.sampling_defaults,
    )


def differences(description: worker_pb2.DescribeResponse, known: ServedModel) -> list[str]:
    """Differences of a worker from the served model of which each alone keeps no worker from serving it."""
    info = description.model
    pairs: dict[str, tuple[object, object]] = {
        "model name": (info.name, known.name),
        "dtype": (info.dtype, known.dtype),
        "sampling defaults": (info.sampling_defaults, known.sampling_defaults),
    }
    return _unequal(pairs)


def with_shortest_context(model: ServedModel, max_model_lens: Iterable[int]) -> ServedModel:
    """Same model with the longest context that every worker in service can hold; unchanged without workers."""
    shortest = min(max_model_lens, default=model.limits.max_model_len)
    if shortest == model.limits.max_model_len:
        return model
    return replace(model, limits=replace(model.limits, max_model_len=shortest))


def _check_same(description: worker_pb2.DescribeResponse, known: ServedModel) -> None:
    """Raise ValueError with every difference from the served model."""
    info = description.model
    pairs: dict[str, tuple[object, object]] = {
        "architecture": (info.architecture, known.architecture),
        "vocab_size": (info.vocab_size, known.limits.vocab_size),
        "eos_token_ids": (sorted(info.eos_token_ids), sorted(known.limits.eos_token_ids)),
    }
    if known.tokenizer is not None and description.HasField("tokenizer"):
        pairs["tokenizer"] = (description.tokenizer.fingerprint[:12], known.tokenizer_fingerprint[:12])
    if wrong := _unequal(pairs):
        raise ValueError(
            f"worker {description.worker_id!r} describes the model {known.name!r} otherwise: {'; '.join(wrong)}; "
            "start it with the same model folder"
        )


def _unequal(pairs: Mapping[str, tuple[object, object]]) -> list[str]:
    """Pairs of what a worker says and what is served, of which both differ, each as a sentence."""
    return [
        f"{name} is {_shown(said)}, and {_shown(served)} is served"
        for name, (said, served) in pairs.items()
        if said != served
    ]


def _shown(value: object) -> str:
    return " ".join(str(value).split()) or "none"  # a message has a line for each field
