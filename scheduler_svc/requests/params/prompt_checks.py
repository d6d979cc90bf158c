"""Checks of prompts before they are tokenised, so that a prompt that can never fit costs nothing.

Reads the request and changes nothing; `request_checks` checks the parameters beside the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.violations import Violations, refusal_of
from quire.errors import CONTEXT_LENGTH_EXCEEDED, FailedPreconditionError
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.params.chat_prompt import num_chars_of

# What an operator changes for a request that the KV pool does not hold.
SERVE_WITH_MORE_MEMORY = "serve with more KV memory (--kv-memory-bytes, --num-blocks, or --kv-dtype int8 on a CPU)"
_SHORT_TEXT_CHARS = 65_536  # tokenised in some tens of milliseconds, whatever it is
_MOST_CHARS_A_TOKEN = 16  # on the average of a text; human languages and programs have 1 to 6

# Log-probabilities of a prompt come in one chunk, which has to fit into one message beside other news.
_MOST_LOGPROB_BYTES = 12 * 1024 * 1024
_LOGPROB_BYTES, _TOP_BYTES = 24, 8  # on the wire at most, of one token and of each likely one beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Limits of the served model, for checks of requests."""

    vocab_size: int
    max_model_len: int  # prompt and output together, in tokens
    eos_token_ids: frozenset[int]
    has_tokenizer: bool
    has_chat_template: bool
    longest_token_chars: int = 0  # of the vocabulary; 0 without a tokenizer

    @property
    def max_text_chars(self) -> int:
        """Longest text that is tokenised: longer text is refused, since tokenising takes 1 or 2 µs a character.

        It would have more tokens than the context holds, unless the tokenizer drops most of it, or it consists of runs
        of spaces or signs, of which a vocabulary may have a hundred in one token.
        """
        return max(_SHORT_TEXT_CHARS, self.max_model_len * min(self.longest_token_chars, _MOST_CHARS_A_TOKEN))


def context_of(limits: ModelLimits) -> str:
    """Words for the length of the context, those of OpenAI and vLLM, by which clients know that it was exceeded."""
    return f"this model's maximum context length is {limits.max_model_len:,} tokens, the output included"


def check_prompt(
    request: pb.GenerateRequest | pb.PinPrefixRequest, kind: str | None, limits: ModelLimits, violations: Violations
) -> None:
    """Add the violations of a prompt or prefix of this kind."""
    if kind == "text":
        _check_text("text", len(request.text), limits, violations)
    elif kind == "chat":
        _check_chat(request.chat, limits, violations)
    elif kind == "token_ids":
        _check_prompt_ids(request.token_ids.ids, limits, violations)


def check_tokenize(request: pb.TokenizeRequest, limits: ModelLimits) -> None:
    """Raise InvalidRequestError for an input that could be no prompt."""
    violations = Violations()
    kind = request.WhichOneof("input")
    if kind == "text":
        _check_text("text", len(request.text), limits, violations)
    elif kind == "chat":
        _check_chat(request.chat, limits, violations)
    else:
        violations.add("input", "is missing: give text or chat")
    violations.raise_if_any()


def check_detokenize(request: pb.DetokenizeRequest, limits: ModelLimits) -> None:
    """Raise InvalidRequestError for ids that are no tokens, or too many."""
    violations = Violations()
    most = max(_SHORT_TEXT_CHARS, limits.max_model_len)
    if len(request.token_ids) > most:
        violations.add("token_ids", f"has {len(request.token_ids):,} ids: give at most {most:,}")
    else:
        check_ids("token_ids", request.token_ids, limits, violations)
    violations.raise_if_any()


def logprob_bytes(num_top: int) -> int:
    """Bytes on the wire, at most, of the log-probabilities of one token and of so many likely ones beside it."""
    return _LOGPROB_BYTES + _TOP_BYTES * num_top


def check_prompt_logprobs(num_tokens: int, num_top: int) -> None:
    """Raise InvalidRequestError if the prompt's log-probabilities, `num_top` tokens each, fit into no message."""
    most = _MOST_LOGPROB_BYTES // logprob_bytes(num_top)
    if num_tokens > most:
        raise refusal_of(
            "output.prompt_logprobs",
            f"is {num_top} for a prompt of {num_tokens:,} tokens: lower it, or shorten the prompt to at most {most:,}",
        )


def _check_chat(chat: pb.ChatPrompt, limits: ModelLimits, violations: Violations) -> None:
    if chat.continue_final_message and chat.add_generation_prompt:
        violations.add("chat.continue_final_message", "excludes add_generation_prompt: set one of them")
    messages = chat.messages
    if not messages:
        violations.add("chat.messages", "is empty: give at least one message")
    elif len(messages) > limits.max_model_len:
        violations.add(
            "chat.messages",
            f"the prompt is too long: {len(messages):,} messages; {context_of(limits)}: shorten it",
            CONTEXT_LENGTH_EXCEEDED,
        )
    else:
        violations.add_each(
            (f"chat.messages[{i}].role", "is empty: say who speaks, for instance user")
            for i, message in enumerate(messages)
            if not message.role
        )
        _check_text("chat.messages", num_chars_of(chat), limits, violations)


def _check_text(field: str, num_chars: int, limits: ModelLimits, violations: Violations) -> None:
    if num_chars > limits.max_text_chars:
        violations.add(
            field,
            f"the prompt is too long: {num_chars:,} characters; {context_of(limits)}: "
            f"give at most {limits.max_text_chars:,} characters",
            CONTEXT_LENGTH_EXCEEDED,
        )


def _check_prompt_ids(ids: Sequence[int], limits: ModelLimits, violations: Violations) -> None:
    longest = limits.max_model_len - 1
    if not ids:
        violations.add("token_ids.ids", "is empty: give at least one token id")
    elif len(ids) > longest:
        violations.add(
            "token_ids.ids",
            f"the prompt is too long: {len(ids):,} token ids; {context_of(limits)}: shorten it to at most {longest:,}",
            CONTEXT_LENGTH_EXCEEDED,
        )
    else:
        check_ids("token_ids.ids", ids, limits, violations)


def check_can_tokenize(kind: str | None, limits: ModelLimits) -> None:
    """Raise FailedPreconditionError if the model lacks what a prompt of this kind needs."""
    if not limits.has_tokenizer and kind != "token_ids":
        raise FailedPreconditionError("the model has no tokenizer: send the prompt as token_ids")
    if kind == "chat" and not limits.has_chat_template:
        raise FailedPreconditionError("the model has no chat template: send the prompt as text")


def check_ids(field: str, ids: Sequence[int], limits: ModelLimits, violations: Violations) -> None:
    """Add violations for ids that are no tokens. The length of the list was checked before."""
    if ids and (min(ids) < 0 or max(ids) >= limits.vocab_size):
        violations.add_each(
            (f"{field}[{i}]", f"is {token_id}: give a token id from 0 to {limits.vocab_size - 1}")
            for i, token_id in enumerate(ids)
            if not 0 <= token_id < limits.vocab_size
        )
