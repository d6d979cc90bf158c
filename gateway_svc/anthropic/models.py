"""`/v1/models` for clients of Anthropic's API."""

from typing import Any

import quire

_UNKNOWN_DATE = "1970-01-01T00:00:00Z"  # Anthropic's value for it


def model_object(model: quire.Model) -> dict[str, Any]:
    """The model in Anthropic's form."""
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": _UNKNOWN_DATE,
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
    }


def model_list(model: quire.Model) -> dict[str, Any]:
    """The one page with the one model."""
    return {"data": [model_object(model)], "has_more": False, "first_id": model.name, "last_id": model.name}
