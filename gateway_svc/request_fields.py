"""Fields of a request that all APIs share, and their meaning for the SDK.

Names are vLLM's where it has the field; the others are ours. Numbers of the SDK's sampling parameters are fields of the
same name. Values are checked by the scheduler, types here. A field that an API has and this server does not support is
refused by name unless it is null.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, WithJsonSchema, create_model, model_validator
from pydantic.functional_validators import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError

import quire
from common.bounds import MOST_BIASED
from gateway_svc.harmless_fields import NOTHING, model_of
from quire.params import GenerateParams

MOST_FIELDS = 256  # of an object that is sent: more than any has
_ALL_TOKENS = (1 << 31) - 1  # as top_k
_SEED_MASK = (1 << 64) - 1
_MOST_WHOLE = 1 << 63
_MOST_DIGITS = 10  # of a token id
_MOST_KEY_CHARS = 512  # of a session key
# Of a beam search; vLLM has them in every request.
_BEAM_DEFAULTS: dict[str, float | bool] = {"length_penalty": 1.0, "early_stopping": False}
_OTHER_KINDS = ("json_object", "regex", "choice", "grammar")  # of structured outputs, besides json

# Keywords of the SDK whose fields have other names here.
FIELD_NAMES = {
    "include_stop": "include_stop_str_in_output",
    "keep_special_tokens": "skip_special_tokens",
    "structured_output": "structured_outputs",
    "json_schema": "structured_outputs.json",
    "json_object": "structured_outputs.json_object",
    "regex": "structured_outputs.regex",
    "choice": "structured_outputs.choice",
    "lark": "structured_outputs.grammar",
}


def _refuse(value: Any) -> Any:
    if value is not None:
        raise PydanticCustomError("unsupported", "this server does not support it; leave it out")
    return value


Unsupported = Annotated[
    Any,
    AfterValidator(_refuse),
    WithJsonSchema({"type": "null"}),
    Field(None, description="Not supported; null is accepted."),
]
# What is given is dropped: nothing keeps it.
Ignored = Annotated[Any, AfterValidator(lambda _: None), Field(None, description="Accepted, and without effect.")]

_Item = TypeVar("_Item")
# A list of a body. Its first wrong item is the only one that is told: of a million each would cost time and memory.
Items = Annotated[list[_Item], Field(fail_fast=True)]


def at_most(number: int) -> BeforeValidator:
    """Refuse an object with more members before each of them has its own error."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > number:
            raise PydanticCustomError(
                "too_long", "it has {has} members: give at most {most}", {"has": len(given), "most": number}
            )
        return given

    return BeforeValidator(check)


class ApiModel(BaseModel):
    """A JSON object with known fields of exact types."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        """Take 5.0 as 5: JSON has one kind of numbers, and encoders of some languages write all with a point.

        Too many fields are refused by one error, where each that is not known would have its own.
        """
        if not isinstance(given, dict):
            return given
        if len(given) > MOST_FIELDS:
            raise PydanticCustomError("too_long", "it has {has} fields, more than there are", {"has": len(given)})
        return {name: _as_whole(value) if type(value) is float else value for name, value in given.items()}


def _as_whole(number: float) -> int | float:
    return int(number) if abs(number) < _MOST_WHOLE and number.is_integer() else number


def by_type(tags: Mapping[str, str], what: str) -> Discriminator:
    """Choose among models by the field `type`; any other type is refused.

    Args:
        tags: of the models, by type. A tag begins with a capital, by which it is told from a field in a place.
        what: of which there are these types.
    """

    def tag_of(given: Any) -> str | None:
        kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        return tags.get(kind) if isinstance(kind, str) else None

    message = f"this server supports {what} of the types {', '.join(tags)}"
    return Discriminator(tag_of, custom_error_type="unsupported", custom_error_message=message)


# Of vLLM's structured outputs: what to give instead, and the value that changes nothing.
_OF_STRUCTURE: dict[str, tuple[str, Any]] = {
    "disable_any_whitespace": ("give json_whitespace, compact (the default) or flexible", True),
    "whitespace_pattern": ("give json_whitespace, compact or flexible", NOTHING),
    "disable_additional_properties": ("give the schema additionalProperties: false", False),
    "disable_fallback": ("leave it out: structured outputs are made by one library here", False),
    "structural_tag": ("give tools with tool_choice, or a grammar", NOTHING),
}
if TYPE_CHECKING:
    VllmStructure = ApiModel
else:
    VllmStructure = model_of("VllmStructure", "Fields of vLLM that change nothing here.", ApiModel, _OF_STRUCTURE)


class StructuredOutputs(VllmStructure):
    """A constraint on the text of outputs, of exactly one kind; the names are vLLM's."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="JSON Schema.")
    json_object: bool | None = None
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = Field(None, description="Grammar in Lark's syntax.")
    json_whitespace: Literal["compact", "flexible"] | None = Field(None, description="Default: compact.")

    def keywords(self) -> GenerateParams:
        """Keywords for the SDK. Raises InvalidRequestError for several kinds, and for none, by their names here."""
        kinds = {"json": self.json_, **{name: getattr(self, name) for name in _OTHER_KINDS}}
        has = [name for name, value in kinds.items() if value is not None and value is not False]
        if len(has) != 1:
            said = f"has {' and '.join(has) or 'nothing'}: give exactly one of {', '.join(kinds)}"
            raise quire.InvalidRequestError.of([quire.FieldViolation("structured_outputs", said)])
        given = quire.StructuredOutput(
            json_schema=self.json_,
            json_object=self.json_object or None,
            regex=self.regex,
            choice=self.choice,
            lark=self.grammar,
            json_whitespace=self.json_whitespace,
        )
        return {"structured_output": given}


class _DeclaredFields(ApiModel):
    """Fields of every request but those that are numbers of the SDK's sampling parameters."""

    model: str | None = Field(None, description="Name of the served model, if given.")
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    logit_bias: Annotated[dict[str, float], at_most(MOST_BIASED)] | None = Field(None, description="Bias by token id.")
    seed: int | None = None
    top_k: int | None = Field(None, description="0 and -1: all tokens.")
    min_tokens: int | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Items[int] | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = Field(None, description="Class from -1000 to 1000; lower is served first.")
    cache_salt: str | None = Field(None, description="Only requests with equal salts share cached prefixes.")
    session_key: str | None = Field(
        None, max_length=_MOST_KEY_CHARS, description="Requests with equal keys go to one shard."
    )

    beam_width: int | None = Field(None, description="Beam search, whose best hypotheses come back.")
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    timeout_s: float | None = Field(None, description="Ends the request after this time with an error.")
    tenant: str | None = None
    on_disconnect: Literal["cancel", "continue"] | None = Field(
        None, description="What becomes of the request when its connection is lost; default: cancel."
    )

    @property
    def names(self) -> Mapping[str, str]:
        """Names of fields by the SDK's keywords, where they differ."""
        return FIELD_NAMES

    @property
    def session(self) -> str | None:
        """Key of the session that the request belongs to, of any length, as it is only hashed; None: of none."""
        return self.session_key or None

    def detaches(self, idempotency_key: str | None) -> bool:
        """True if a reader that goes leaves the request to its on_disconnect: it goes on, or a retry finds it."""
        return idempotency_key is not None or self.on_disconnect == "continue"

    def params(self, request_id: str) -> GenerateParams:
        """Keywords for the SDK."""
        given: Any = {"request_id": request_id} | {
            name: value
            for name in _SAME_NAMES
            if (value := getattr(self, name)) is not None
            and (self.beam_width is not None or value != _BEAM_DEFAULTS.get(name))
        }
        if self.top_k is not None:
            given["top_k"] = self.top_k if self.top_k not in (0, -1) else _ALL_TOKENS
        if self.seed is not None:
            given["seed"] = self.seed & _SEED_MASK
        if self.logit_bias:
            given["logit_bias"] = token_biases(self.logit_bias)
        if self.include_stop_str_in_output is not None:
            given["include_stop"] = self.include_stop_str_in_output
        if self.skip_special_tokens is not None:
            given["keep_special_tokens"] = not self.skip_special_tokens
        if self.on_disconnect is not None:
            given["on_disconnect"] = quire.OnDisconnect(self.on_disconnect)
        keywords: GenerateParams = given
        if self.structured_outputs is not None:
            keywords.update(self.structured_outputs.keywords())
        return keywords


# Scalars of the SDK's sampling parameters with the same name here, so that a new one needs no line in this file.
_SAMPLING_FIELDS: dict[str, Any] = {
    each.name: (each.type, None)
    for each in dataclasses.fields(quire.SamplingParams)
    if each.type in (float | None, int | None) and each.name not in (*_DeclaredFields.model_fields, "n", "best_of")
}
_SAME_NAMES = (
    *_SAMPLING_FIELDS,
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "allowed_token_ids",
    "priority",
    "cache_salt",
    "beam_width",
    "length_penalty",
    "early_stopping",
    "timeout_s",
    "tenant",
)

if TYPE_CHECKING:
    RequestFields = _DeclaredFields
else:
    RequestFields = create_model("RequestFields", __base__=_DeclaredFields, **_SAMPLING_FIELDS)
    RequestFields.__doc__ = "Fields of every request."


def token_biases(given: Mapping[str, float]) -> dict[int, float]:
    """Biases by token id. Raises InvalidRequestError for a key that is no token id."""
    biases = {}
    for key, bias in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > _MOST_DIGITS:
            violation = quire.FieldViolation("logit_bias", f"has the key {key!r:.40}: give token ids")
            raise quire.InvalidRequestError.of([violation])
        biases[int(key)] = bias
    return biases


def new_request_id(
    client: quire.AsyncClient,
    prefix: str,
    prompt: "str | Sequence[int] | quire.Chat",
    idempotency_key: str | None,
    body: RequestFields,
) -> str:
    """An id for a call, behind the prefix; the same key of a tenant gives the same one, so that a retry attaches.

    Without such a key the request goes to the shard of its session, or to the one that suits its prompt.
    """
    if idempotency_key is None:
        return client.new_request_id(
            prompt, prefix=prefix, cache_salt=body.cache_salt, tenant=body.tenant, session_key=body.session
        )
    owned = f"{body.tenant or ''}\n{idempotency_key}"
    return f"{prefix}{hashlib.sha256(owned.encode()).hexdigest()[:32]}"
