"""Fields of vLLM's requests for completions that this server takes only where they change nothing.

Each is refused by name with what serves the same purpose here; null, and the value that vLLM has by default, are taken,
since clients send those, too. The fields of vLLM that have an effect are declared with the others.
"""

from typing import TYPE_CHECKING, Any

from gateway_svc.harmless_fields import NOTHING, model_of
from gateway_svc.request_fields import ApiModel

_CUT = "cut the prompt yourself: /tokenize has its tokens, and /v1/completions takes token ids as prompt"
_BY_SERVER = "leave it out: it is not a matter of requests here"

# What to do instead, and the value that changes nothing.
_FIELDS: dict[str, tuple[str, Any]] = {
    "use_beam_search": ("give beam_width, and as n the number of hypotheses to return", False),
    "bad_words": ("give logit_bias with -100 for token ids that must not come", []),
    "spaces_between_special_tokens": ("leave it out: texts are those of the tokenizer, spaces included", True),
    "truncate_prompt_tokens": (_CUT, NOTHING),
    "truncation_side": (_CUT, NOTHING),
    "guided_json": ("give structured_outputs.json, or response_format", NOTHING),
    "guided_regex": ("give structured_outputs.regex", NOTHING),
    "guided_choice": ("give structured_outputs.choice", NOTHING),
    "guided_grammar": ("give structured_outputs.grammar, in Lark's syntax", NOTHING),
    "guided_json_object": ("give structured_outputs.json_object, or response_format", False),
    "guided_whitespace_pattern": ("give structured_outputs.json_whitespace, compact or flexible", NOTHING),
    "guided_decoding_backend": ("leave it out: structured outputs are made by one library here", NOTHING),
    "structural_tag": ("give tools with tool_choice, or structured_outputs", NOTHING),
    "request_id": ("send the header Idempotency-Key: a repeated request then attaches to the first", NOTHING),
    "session_id": ("give session_key", NOTHING),
    "stream_interval": (f"{_BY_SERVER}, see --stream-interval-ms of the scheduler", 1),
    "thinking_token_budget": ("give max_tokens, which bounds reasoning and answer together", -1),
    "logprob_token_ids": ("give allowed_token_ids with logprobs, or take the most likely tokens", NOTHING),
    "logits_processors": ("give logit_bias, allowed_token_ids or structured_outputs", []),
    "kv_transfer_params": (f"{_BY_SERVER}: see --role of workers", NOTHING),
    "ec_transfer_params": (f"{_BY_SERVER}: only text is served", NOTHING),
    "vllm_xargs": ("leave it out: no field here reads it", {}),
    "repetition_detection": ("give frequency_penalty or repetition_penalty, which keep an output from it", NOTHING),
    "watermarking": ("leave it out: outputs have no watermark here", False),
    "routed_experts_prompt_start": ("leave it out: answers do not have the experts of tokens", 0),
    "return_token_offsets": ("give return_token_strs to /tokenize, which has a text's tokens one by one", False),
    "return_mm_kwargs": ("leave it out: only text is served", True),
}
_COMPLETION_FIELDS: dict[str, tuple[str, Any]] = {
    "prompt_embeds": ("give prompt, as text or token ids", NOTHING),
}
_CHAT_FIELDS: dict[str, tuple[str, Any]] = {
    "echo": ("put the last message before the answer yourself; continue_final_message continues it", False),
    "add_special_tokens": ("leave it out: the chat template writes them", False),
    "return_prompt_text": ("give return_token_ids, and /detokenize the prompt_token_ids of the answer", False),
    "chat_template": ("the model's own one is used: render another one yourself, and ask /v1/completions", NOTHING),
    "mm_processor_kwargs": (_BY_SERVER, NOTHING),
    "media_io_kwargs": (_BY_SERVER, NOTHING),
}


if TYPE_CHECKING:
    VllmFields = ApiModel
    VllmCompletionFields = ApiModel
    VllmChatFields = ApiModel
else:
    VllmFields = model_of(
        "VllmFields", "Fields of vLLM for completions of either kind that change nothing here.", ApiModel, _FIELDS
    )
    VllmCompletionFields = model_of(
        "VllmCompletionFields", "Those of completions of prompts alone.", ApiModel, _COMPLETION_FIELDS
    )
    VllmChatFields = model_of("VllmChatFields", "Those of chat completions alone.", ApiModel, _CHAT_FIELDS)
