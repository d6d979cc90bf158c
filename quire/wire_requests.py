"""Requests to protobuf. A value that its field cannot carry is an InvalidRequestError that names the field."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from quire.params import (
    BeamParams,
    Chat,
    ChatMessage,
    JsonWhitespace,
    Messages,
    OnDisconnect,
    PauseKeep,
    RequestParams,
    StructuredOutput,
)
from quire.request_list import LiveState
from quire.rpc import PUBLIC_MESSAGE_BYTES
from quire.v1 import inference_pb2 as pb
from quire.wire_chat import chat_to_pb
from quire.wire_fields import invalid_field, json_field, set_field

M = TypeVar("M", bound=Message)

_ON_DISCONNECT = {each: pb.OnDisconnect.Value(f"ON_DISCONNECT_{each.name}") for each in OnDisconnect}
_PAUSE_KEEP: dict[PauseKeep, pb.PauseKeep.ValueType] = {"auto": pb.PAUSE_KEEP_AUTO, "tokens": pb.PAUSE_KEEP_TOKENS}
_JSON_WHITESPACE: dict[JsonWhitespace, pb.JsonWhitespace.ValueType] = {
    "compact": pb.JSON_WHITESPACE_COMPACT,
    "flexible": pb.JSON_WHITESPACE_FLEXIBLE,
}
_LIVE_STATES = {each: pb.LiveState.Value(f"LIVE_STATE_{each.name}") for each in LiveState}
_FRAME_BYTES = 1024  # room for the fields around a request in its message


def encode(kind: type[M], **values: Any) -> M:
    """Encodes a request of scalars and lists, by the names of its fields; None leaves a field absent."""
    message = kind()
    for name, value in values.items():
        set_field(message, "", name, value)
    return message


def request_to_pb(prompt: "str | Sequence[int] | pb.ChatPrompt", params: RequestParams) -> pb.GenerateRequest:
    """Encodes a request, which has its id. Its session key has served its purpose, and stays here."""
    if not isinstance(params.session_key, str | None):
        raise invalid_field("session_key", f"cannot be {params.session_key!r:.80}: give a text")
    message = pb.GenerateRequest()
    set_field(message, "", "request_id", params.request_id)
    _set_prompt(message, prompt)
    for group in ("sampling", "stopping", "output"):
        values = getattr(params, group)
        for field in fields(values):
            set_field(getattr(message, group), f"{group}.", field.name, getattr(values, field.name))
    if params.beam is not None:
        _set_beam(message.beam, params.beam)
    if params.structured_output is not None:
        _set_structured_output(message.structured_output, params.structured_output)
    for name in ("tenant", "cache_salt", "priority", "annotation"):
        set_field(message, "", name, getattr(params, name))
    if params.timeout_s is not None:
        set_field(message, "", "timeout_ms", _milliseconds(params.timeout_s))
    message.on_disconnect = _on_disconnect(params.on_disconnect)
    _check_size(message, "prompt")
    return message


def tokenize_to_pb(text: str | Chat, add_special_tokens: bool) -> pb.TokenizeRequest:
    """Encodes a text or conversation to tokenise."""
    message = encode(pb.TokenizeRequest, add_special_tokens=add_special_tokens)
    if isinstance(text, str):
        set_field(message, "", "text", text)
    else:
        message.chat.CopyFrom(chat_to_pb(text))
    return message


def pin_to_pb(
    name: str, prefix: str | Sequence[int] | Chat | Messages, tenant: str | None, cache_salt: str | None
) -> pb.PinPrefixRequest:
    """Encodes a prefix to pin."""
    message = pb.PinPrefixRequest()
    set_field(message, "", "name", name)
    _set_prompt(message, _prompt_of(prefix))
    set_field(message, "", "tenant", tenant)
    set_field(message, "", "cache_salt", cache_salt)
    _check_size(message, "prefix")
    return message


def pause_to_pb(request_id: str, keep: PauseKeep) -> pb.PauseRequest:
    """Encodes the pause of a request. Raises ValueError for an unknown `keep`."""
    if keep not in _PAUSE_KEEP:
        raise ValueError(f"keep is {keep!r}: give one of {', '.join(map(repr, _PAUSE_KEEP))}")
    return encode(pb.PauseRequest, request_id=request_id, keep=_PAUSE_KEEP[keep])


def list_requests_to_pb(
    tenant: str | None,
    state: "LiveState | str | Sequence[LiveState | str] | None",
    page_size: int,
    page_token: str | None,
) -> pb.ListRequestsRequest:
    """Encodes the filter of a listing of requests. Raises ValueError for an unknown state."""
    message = encode(pb.ListRequestsRequest, tenant=tenant, page_size=page_size, page_token=page_token)
    wanted = [] if state is None else [state] if isinstance(state, (str, LiveState)) else list(state)
    for each in wanted:
        try:
            message.states.append(_LIVE_STATES[LiveState(each)])
        except ValueError:
            choices = ", ".join(repr(known.value) for known in LiveState)
            raise ValueError(f"state is {each!r}: give one of {choices}") from None
    return message


def _prompt_of(prefix: str | Sequence[int] | Chat | Messages) -> "str | Sequence[int] | pb.ChatPrompt":
    """The prefix, with a conversation encoded as such."""
    if isinstance(prefix, Chat):
        return chat_to_pb(prefix)
    if isinstance(prefix, (str, bytes, bytearray)) or not isinstance(prefix, Iterable):
        return prefix
    turns = [each for each in prefix if isinstance(each, (ChatMessage, Mapping))]
    token_ids = [each for each in prefix if not isinstance(each, (ChatMessage, Mapping))]
    if turns and token_ids:
        raise TypeError("a prefix is a text, token ids or messages, not a mixture: give one of them")
    return chat_to_pb(turns) if turns else token_ids


def _set_beam(message: pb.BeamParams, beam: BeamParams) -> None:
    message.SetInParent()
    set_field(message, "beam.", "beam_width", beam.beam_width)
    set_field(message, "beam.", "length_penalty", beam.length_penalty)
    match beam.early_stopping:
        case None:
            pass
        case False:
            message.early_stopping = pb.EARLY_STOPPING_FALSE
        case True:
            message.early_stopping = pb.EARLY_STOPPING_TRUE
        case "never":
            message.early_stopping = pb.EARLY_STOPPING_NEVER
        case other:
            raise invalid_field("beam.early_stopping", f'must be True, False or "never", not {other!r}')


def _set_structured_output(message: pb.StructuredOutput, output: StructuredOutput) -> None:
    path = "structured_output."
    kinds = ("json_schema", "json_object", "regex", "choice", "lark")
    given = [name for name in kinds if getattr(output, name) is not None]
    if len(given) != 1:
        said = " and ".join(given) or "nothing"
        raise invalid_field("structured_output", f"has {said}: give exactly one of {', '.join(kinds)}")
    kind = given[0]
    value = getattr(output, kind)
    if kind == "choice":
        message.choice.SetInParent()
        is_several = isinstance(value, Iterable) and not isinstance(value, str | bytes)  # not the letters of one text
        set_field(message.choice, f"{path}choice.", "texts", list(value) if is_several else value)
    elif kind == "json_schema" and not isinstance(value, str):
        set_field(message, path, kind, json_field(path + kind, value))
    else:
        set_field(message, path, kind, value)
    if output.json_whitespace is not None:
        try:
            message.json_whitespace = _JSON_WHITESPACE[output.json_whitespace]
        except KeyError:
            choices = " or ".join(map(repr, _JSON_WHITESPACE))
            raise invalid_field(
                f"{path}json_whitespace", f"is {output.json_whitespace!r:.80}: give {choices}"
            ) from None


def _set_prompt(
    message: pb.GenerateRequest | pb.PinPrefixRequest, prompt: "str | Sequence[int] | pb.ChatPrompt"
) -> None:
    if isinstance(prompt, str):
        set_field(message, "", "text", prompt)
    elif isinstance(prompt, pb.ChatPrompt):
        message.chat.CopyFrom(prompt)
    elif isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, bytearray)):
        message.token_ids.SetInParent()
        set_field(message.token_ids, "token_ids.", "ids", list(prompt))
    else:
        raise TypeError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}")


def _check_size(message: Message, field: str) -> None:
    size_bytes = message.ByteSize()
    if size_bytes > PUBLIC_MESSAGE_BYTES - _FRAME_BYTES:
        raise invalid_field(field, f"the request is {size_bytes} bytes; send at most {PUBLIC_MESSAGE_BYTES}")


def _on_disconnect(given: OnDisconnect | str) -> pb.OnDisconnect.ValueType:
    try:
        return _ON_DISCONNECT[OnDisconnect(given)]
    except ValueError:
        choices = " or ".join(f"OnDisconnect.{each.name}" for each in OnDisconnect)
        raise invalid_field("on_disconnect", f"cannot be {given!r:.80}: give {choices}") from None


def _milliseconds(seconds: float) -> int:
    if not isinstance(seconds, (int, float)):
        raise invalid_field("timeout_ms", f"cannot be {seconds!r:.80}: give a number of seconds")
    if not 0 < seconds < 1e9:
        raise invalid_field("timeout_ms", f"is {seconds:g}: give more than 0 and less than 1e9 seconds")
    return max(1, round(seconds * 1000))
