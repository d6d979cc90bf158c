"""Thinking in Anthropic's form: options of a request, and signatures of thinking blocks.

A signature is a function of the reasoning. That of a block whose reasoning is omitted has the reasoning itself, so that
a conversation goes on with it and no server keeps it. Nothing is encrypted, and signatures are not verified.
"""

import base64
import binascii
import hashlib
from typing import Any, Literal

from pydantic import Field

from gateway_svc.api_error import invalid
from gateway_svc.request_fields import ApiModel
from gateway_svc.thinking_variables import thinking_variables

MIN_BUDGET_TOKENS = 1024  # Anthropic's
_OMITTED = "omitted."  # before reasoning in base64


class Thinking(ApiModel):
    """Options of thinking: whether the model thinks before it answers, and how that comes back."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(
        None, ge=MIN_BUDGET_TOKENS, description="Without effect: max_tokens bounds thinking and answer."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="Default: summarized, which is the whole reasoning; omitted: only its signature."
    )

    def check(self) -> None:
        """Raises ApiError for fields that do not belong to the type."""
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise invalid("thinking.budget_tokens", "belongs to the type enabled, and is required there")
        if self.type == "disabled" and self.display is not None:
            raise invalid("thinking.display", "leave it out where thinking is disabled")

    @property
    def is_on(self) -> bool:
        """True if the model is asked to think, or to decide itself."""
        return self.type != "disabled"

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of chat templates."""
        return thinking_variables(is_on=self.is_on)


def signature_of(reasoning: str) -> str:
    """The signature of a thinking block."""
    return hashlib.sha256(reasoning.encode()).hexdigest()


def omitting_signature(reasoning: str) -> str:
    """The signature of a thinking block whose reasoning is omitted."""
    return _OMITTED + base64.b64encode(reasoning.encode()).decode()


def omitted_reasoning(signature: str) -> str:
    """The reasoning of a block that was omitted; empty if the signature is another server's."""
    if not signature.startswith(_OMITTED):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_OMITTED), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
