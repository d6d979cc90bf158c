"""`/v1/models`: the one model that is served."""

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
