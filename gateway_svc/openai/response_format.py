"""`response_format` of completions and chat completions: its fields, and what they mean for the SDK."""

from typing import Any, Literal

from pydantic import Field

from gateway_svc.api_error import invalid
from gateway_svc.request_fields import ApiModel, Ignored
from quire.params import GenerateParams

# Fields of bodies by the SDK's keywords, where the format was given so.
FORMAT_NAMES = {
    "structured_output": "response_format",
    "lark": "response_format",
    "json_schema": "response_format.json_schema",
}


class JsonSchema(ApiModel):
    """A schema and its name, which is for the client; `strict` is always on."""

    name: str = Field(max_length=64)
    description: Ignored
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Default: any object.")
    strict: Ignored


class ResponseFormat(ApiModel):
    """The format of an answer: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def keywords(self) -> GenerateParams:
        """Keywords for the SDK. Raises ApiError if the schema is missing or superfluous."""
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise invalid("response_format.json_schema", "belongs to the type json_schema, and is required there")
        if self.type == "text":
            return {}
        schema = None if self.json_schema is None else self.json_schema.schema_
        return {"json_object": True} if schema is None else {"json_schema": schema}
