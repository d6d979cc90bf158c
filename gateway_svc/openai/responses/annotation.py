"""The annotation of a request that is a response: what the scheduler keeps with it for the gateways.

A response is a function of its annotation and of the request's record, so that any gateway can answer for it. It is
read back as a client's data, since any client may annotate a request.
"""

from dataclasses import replace
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from common.bounds import MOST_ANNOTATION_BYTES
from gateway_svc.api_error import invalid
from gateway_svc.openai.responses.items import InputItem
from gateway_svc.request_fields import ApiModel
from quire.parsing.answer_format import AnswerFormat

ID_PREFIX = "resp_"


class Annotation(ApiModel):
    """Fields of the request for a response that its object repeats, and its input if it is stored.

    Fields at their defaults are not written, since items of an earlier version forbid fields that it does not know: a
    new field has a default, and a default never changes.
    """

    model_config = ConfigDict(extra="ignore")  # a newer gateway may have written more

    model: str
    store: bool
    background: bool
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    has_logprobs: bool
    truncation: str
    text: dict[str, Any]
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    tools: list[dict[str, Any]] = Field(default_factory=list)  # as the object has them
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: int | None = None
    reasoning: dict[str, str | None] = Field(default={"effort": None, "summary": None})
    tool_parser: str | None = None  # of the format of its output, as are the next two
    reasoning_parser: str | None = None
    is_forced: bool = False
    may_call_several: bool = True
    input: list[InputItem]  # empty if it is not stored

    @property
    def answer_format(self) -> AnswerFormat:
        """The format of its output."""
        format = AnswerFormat(tool_parser=self.tool_parser, reasoning_parser=self.reasoning_parser)
        return replace(format.offering(str(each.get("name")) for each in self.tools), is_forced=self.is_forced)

    @property
    def max_calls(self) -> int | None:
        """Most calls that come back; None: any number."""
        return self.max_tool_calls if self.may_call_several else 1

    def encode(self) -> bytes:
        """Raises ApiError if it is too large to be kept."""
        data = self._dumped()
        if len(data) <= MOST_ANNOTATION_BYTES:
            return data
        others = self.model_copy(update={"input": []})
        if self.input and len(others._dumped()) <= MOST_ANNOTATION_BYTES:
            raise invalid(
                "input",
                f"takes {len(data):,} bytes to store with tools and instructions, and at most "
                f"{MOST_ANNOTATION_BYTES:,} are kept: shorten it, or give store: false",
            )
        sizes = {name: len(self._dumped({name})) for name in type(self).model_fields if name != "input"}
        raise invalid(
            max(sizes, key=sizes.__getitem__),
            f"is too long: what the response repeats takes {len(others._dumped()):,} bytes, and at most "
            f"{MOST_ANNOTATION_BYTES:,} are kept: shorten it",
        )

    def _dumped(self, names: set[str] | None = None) -> bytes:
        return self.model_dump_json(include=names, by_alias=True, exclude_defaults=True).encode()


def decode_annotation(data: bytes) -> Annotation | None:
    """The annotation of a response; None for that of another kind of request."""
    try:
        return Annotation.model_validate_json(data)
    except ValidationError:
        return None
