"""Fields of other servers that this one takes only where they change nothing, and else refuses by name.

The refusal says what serves the same purpose here. Knows no field.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, WithJsonSchema, create_model
from pydantic_core import PydanticCustomError

NOTHING = object()  # as harmless value: none besides null


def model_of(name: str, about: str, base: type[BaseModel], fields: Mapping[str, tuple[str, Any]]) -> Any:
    """A model with a field of each name, which takes null and one harmless value.

    Args:
        name: of the model.
        about: its docstring.
        base: of it.
        fields: by name, what to give instead, and the value that changes nothing.
    """
    made: Any = create_model(name, __base__=base, **{field: _field(*each) for field, each in fields.items()})
    made.__doc__ = about
    return made


def _field(instead: str, harmless: Any) -> Any:
    def check(given: Any) -> Any:
        if given is not None and (type(given) is not type(harmless) or given != harmless):
            raise PydanticCustomError("unsupported", "this server does not support it; {instead}", {"instead": instead})
        return given

    taken = [None] if harmless is NOTHING else [harmless, None]
    described = Field(None, description=f"Of vLLM, without effect; instead {instead}.")
    return Annotated[Any, AfterValidator(check), WithJsonSchema({"enum": taken}), described], None
