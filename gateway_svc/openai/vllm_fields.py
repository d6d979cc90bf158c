"""Fields of vLLM's requests for completions that this server takes only where they change nothing.

Each is refused by name with what serves the same purpose here; null, and the value that vLLM has by default, are taken,
since clients send those, too. The fields of vLLM that have an effect are declared with the others.
"""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field, WithJsonSchema, create_model
from pydantic_core import PydanticCustomError

from gateway_svc.request_fields import ApiModel

_CUT = "cut the prompt yourself: /tokenize has its tokens, and /v1/completions takes token ids as prompt"
_BY_SERVER = "leave it out: it is not a matter of requests here"
_NOTHING = object()  # besides null no value is taken

# What to do instead, and the value that changes nothing.
_FIELDS: dict[str, tuple[str, Any]] = {
    "use_beam_search": ("give beam_width, and as n the number of hypotheses to return", False),
    "bad_words": ("give logit_bias with -100 for token ids that must not come", []),
    "spaces_between_special_tokens": ("leave it out: texts are those of the tokenizer, spaces included", True),
    "truncate_prompt_tokens": (_CUT, _NOTHING),
    "truncation_side": (_CUT, _NOTHING),
    "guided_json": ("give structured_outputs.json, or response_format", _NOTHING),
    "guided_regex": ("give structured_outputs.regex", _NOTHING),
    "guided_choice": ("give structured_outputs.choice", _NOTHING),
    "guided_grammar": ("give structured_outputs.grammar, in Lark's syntax", _NOTHING),
    "guided_json_object": ("give structured_outputs.json_object, or response_format", False),
    "guided_whitespace_pattern": ("give structured_outputs.json_whitespace, compact or flexible", _NOTHING),
    "guided_decoding_backend": ("leave it out: structured outputs are made by one library here", _NOTHING),
    "structural_tag": ("give tools with tool_choice, or structured_outputs", _NOTHING),
    "request_id": ("send the header Idempotency-Key: a repeated request then attaches to the first", _NOTHING),
    "session_id": ("give session_key", _NOTHING),
    "stream_interval": (f"{_BY_SERVER}, see --stream-interval-ms of the scheduler", 1),
    "thinking_token_budget": ("give max_tokens, which bounds reasoning and answer together", -1),
    "logprob_token_ids": ("give allowed_token_ids with logprobs, or take the most likely tokens", _NOTHING),
    "logits_processors": ("give logit_bias, allowed_token_ids or structured_outputs", []),
    "kv_transfer_params": (f"{_BY_SERVER}: see --role of workers", _NOTHING),
    "vllm_xargs": ("leave it out: no field here reads it", {}),
}
_CHAT_FIELDS: dict[str, tuple[str, Any]] = {
    "echo": ("put the last message before the answer yourself; continue_final_message continues it", False),
    "add_special_tokens": ("leave it out: the chat template writes them", False),
    "chat_template": ("the model's own one is used: render another one yourself, and ask /v1/completions", _NOTHING),
    "mm_processor_kwargs": (_BY_SERVER, _NOTHING),
    "media_io_kwargs": (_BY_SERVER, _NOTHING),
}


def _field(instead: str, harmless: Any) -> Any:
    """A field that takes null and one harmless value."""

    def check(given: Any) -> Any:
        if given is not None and (type(given) is not type(harmless) or given != harmless):
            raise PydanticCustomError("unsupported", "this server does not support it; {instead}", {"instead": instead})
        return given

    taken = [None] if harmless is _NOTHING else [harmless, None]
    described = Field(None, description=f"Of vLLM, without effect; instead {instead}.")
    return Annotated[Any, AfterValidator(check), WithJsonSchema({"enum": taken}), described], None


def _model(name: str, fields: dict[str, tuple[str, Any]]) -> Any:
    return create_model(name, __base__=ApiModel, **{field: _field(*each) for field, each in fields.items()})


if TYPE_CHECKING:
    VllmFields = ApiModel
    VllmChatFields = ApiModel
else:
    VllmFields = _model("VllmFields", _FIELDS)
    VllmFields.__doc__ = "Fields of vLLM for completions of either kind that change nothing here."
    VllmChatFields = _model("VllmChatFields", _CHAT_FIELDS)
    VllmChatFields.__doc__ = "Those of chat completions alone."
