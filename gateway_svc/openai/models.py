"""`/v1/models` for clients of OpenAI's API: the one model that is served."""

import time
from typing import Any

import quire

_BEGAN_S = int(time.time())


def model_object(model: quire.Model) -> dict[str, Any]:
    """The model in OpenAI's form, with the length of its context as vLLM gives it."""
    return {
        "id": model.name,
        "object": "model",
        "created": _BEGAN_S,
        "owned_by": "quire",
        "root": model.name,
        "max_model_len": model.max_model_len,
    }


def model_list(model: quire.Model) -> dict[str, Any]:
    """The list of the one model."""
    return {"object": "list", "data": [model_object(model)]}
