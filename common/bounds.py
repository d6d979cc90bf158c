"""The bound of every string, list and map of a request, by the full name of its field: one table for all RPCs.

`common.bounds_check` applies it at the edge of every server, before a handler sees the message. A test fails for a
field of a request that has no bound here, and for one whose comment in the .proto does not state it.
Bounds by the model that is served, such as its context, are smaller and are checked where the model is known.
"""

from dataclasses import dataclass

MOST_TEXT_BYTES = 8 * 1024 * 1024  # of UTF-8: the longest context that is served fits as any human language
MOST_TOKEN_IDS = 2 * 1024 * 1024
MOST_MESSAGES = 65_536  # of a chat
MOST_TOOL_CALLS = 128  # of a message
MOST_JSON_BYTES = 1024 * 1024  # of tools, or of variables of a chat template
MOST_SAMPLES = 128
MOST_STOP_STRINGS = 16
MOST_STOP_TOKEN_IDS = 256
MOST_BIASED = 1024
MOST_ALLOWED = 65_536
MOST_CONSTRAINT_BYTES = 65_536  # of a schema, expression or grammar
MOST_CHOICES = 1024
MOST_GRAMMAR_CHARS = 4 * MOST_CONSTRAINT_BYTES  # as a worker gets it: JSON, which escapes some characters
MOST_SEATS = 65_536  # of one worker
MOST_READ_BLOCKS = 262_144  # of one fetch
MOST_ANNOTATION_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Bounds of one field; None: only its type bounds it. For a list, the bounds on text hold for each item."""

    max_chars: int | None = None
    max_bytes: int | None = None  # of a string in UTF-8, or of bytes
    max_items: int | None = None  # of a list or map


NAME = Bound(max_chars=128)  # an id or a name; fingerprints and incarnations are names, too
TEXT = Bound(max_bytes=MOST_TEXT_BYTES)
JSON = Bound(max_bytes=MOST_JSON_BYTES)

BOUNDS: dict[str, Bound] = {
    "quire.v1.GenerateRequest.request_id": NAME,
    "quire.v1.GenerateRequest.text": TEXT,
    "quire.v1.GenerateRequest.tenant": NAME,
    "quire.v1.GenerateRequest.cache_salt": NAME,
    "quire.v1.GenerateRequest.annotation": Bound(max_bytes=MOST_ANNOTATION_BYTES),
    "quire.v1.TokenIds.ids": Bound(max_items=MOST_TOKEN_IDS),
    "quire.v1.ChatPrompt.messages": Bound(max_items=MOST_MESSAGES),
    "quire.v1.ChatPrompt.tools": JSON,
    "quire.v1.ChatPrompt.template_kwargs": JSON,
    "quire.v1.ChatMessage.role": NAME,
    "quire.v1.ChatMessage.content": TEXT,
    "quire.v1.ChatMessage.tool_calls": Bound(max_items=MOST_TOOL_CALLS),
    "quire.v1.ChatMessage.tool_call_id": NAME,
    "quire.v1.ChatMessage.name": NAME,
    "quire.v1.ChatMessage.reasoning": TEXT,
    "quire.v1.ToolCall.id": NAME,
    "quire.v1.ToolCall.name": NAME,
    "quire.v1.ToolCall.arguments": TEXT,
    "quire.v1.SamplingParams.logit_bias": Bound(max_items=MOST_BIASED),
    "quire.v1.SamplingParams.allowed_token_ids": Bound(max_items=MOST_ALLOWED),
    "quire.v1.StoppingParams.stop": Bound(max_items=MOST_STOP_STRINGS, max_bytes=256),
    "quire.v1.StoppingParams.stop_token_ids": Bound(max_items=MOST_STOP_TOKEN_IDS),
    "quire.v1.StructuredOutput.json_schema": Bound(max_bytes=MOST_CONSTRAINT_BYTES),
    "quire.v1.StructuredOutput.regex": Bound(max_bytes=MOST_CONSTRAINT_BYTES),
    "quire.v1.StructuredOutput.lark": Bound(max_bytes=MOST_CONSTRAINT_BYTES),
    "quire.v1.Choice.texts": Bound(max_items=MOST_CHOICES, max_bytes=MOST_CONSTRAINT_BYTES),
    "quire.v1.Attach.request_id": NAME,
    "quire.v1.Attach.from_positions": Bound(max_items=MOST_SAMPLES),
    "quire.v1.AttachRequest.request_id": NAME,
    "quire.v1.AttachRequest.from_positions": Bound(max_items=MOST_SAMPLES),
    "quire.v1.PauseRequest.request_id": NAME,
    "quire.v1.ResumeRequest.request_id": NAME,
    "quire.v1.CancelRequest.request_id": NAME,
    "quire.v1.GetRequestRequest.request_id": NAME,
    "quire.v1.DeleteRecordRequest.request_id": NAME,
    "quire.v1.ListRequestsRequest.tenant": NAME,
    "quire.v1.ListRequestsRequest.states": Bound(max_items=16),
    "quire.v1.ListRequestsRequest.page_token": NAME,
    "quire.v1.TokenizeRequest.text": TEXT,
    "quire.v1.DetokenizeRequest.token_ids": Bound(max_items=MOST_TOKEN_IDS),
    "quire.v1.PinPrefixRequest.name": NAME,
    "quire.v1.PinPrefixRequest.text": TEXT,
    "quire.v1.PinPrefixRequest.tenant": NAME,
    "quire.v1.PinPrefixRequest.cache_salt": NAME,
    "quire.v1.UnpinPrefixRequest.name": NAME,
    "quire.v1.UnpinPrefixRequest.tenant": NAME,
    "quire.v1.ListPrefixesRequest.tenant": NAME,
    "quire.v1.RegisterRequest.worker_id": NAME,
    "quire.v1.RegisterRequest.address": Bound(max_chars=260),  # a host name has at most 253
    "quire.v1.RegisterRequest.incarnation": NAME,
    "quire.v1.RegisterRequest.model_fingerprint": NAME,
    "quire.v1.RegisterRequest.step_key": NAME,
    "quire.v1.DrainWorkerRequest.worker_id": NAME,
    "quire.v1.DescribeRequest.known_tokenizer_fingerprint": NAME,
    "quire.v1.StepRequest.whole": Bound(max_items=MOST_SEATS),
    "quire.v1.FetchBlocksRequest.source_address": Bound(max_chars=260),
    "quire.v1.ReadBlocksRequest.incarnation": NAME,
    "quire.v1.ReadBlocksRequest.block_ids": Bound(max_bytes=4 * MOST_READ_BLOCKS),
    "quire.v1.ReadBlocksRequest.block_format": Bound(max_chars=256),
    "quire.v1.ReadBlocksRequest.read_key": NAME,
}

# Messages whose arrays are bounded by the size of the message. Every token waits for a step, so the edge does not check
# it: `worker_svc.steps.step_check` compares each entry with the worker's state before it is used.
CHECKED_BY_HANDLER = frozenset({"quire.v1.StepRequest"})

# For requests to health and reflection, whose messages are not ours.
FOREIGN = Bound(max_chars=1024, max_bytes=4096, max_items=64)

# Fields of a session's message that wrap the user's request: left out of the path to a field.
WRAPPERS = frozenset({"quire.v1.SessionRequest.submit", "quire.v1.SessionRequest.attach"})
