"""The model's tokenizer: text and chats to token ids and back. Made from files that a worker sent, not from disk.

Knows no request and no model; nothing in it changes after construction, so any thread may call it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from common.native_faults import CONTROL_FLOW, shortened
from common.violations import refusal_of
from quire.errors import FailedPreconditionError, InvalidRequestError
from quire.parsing.think_tags import OPENING_TAGS
from scheduler_svc.text.answer_format import answer_format_of
from scheduler_svc.text.chat_template import ChatTemplate
from scheduler_svc.text.incremental_decoder import IncrementalDecoder
from scheduler_svc.text.token_pieces import TokenPieces
from scheduler_svc.text.tokenizer_program import usable
from scheduler_svc.text.tokenizer_trial import TokenizerProcesses

MAX_TOKEN_ID = 1 << 22  # a table has a byte for each id; no vocabulary has as many
_MOST_TRIED = 4096  # tokens, to find a plain one
_MOST_TAG_TOKENS = 12  # of a tag that opens reasoning, and of whitespace behind it


class ModelTokenizer:
    """The content of tokenizer.json, the chat template (empty if the model has none) and its special tokens.

    `special_tokens` maps roles ("bos_token", "eos_token", ...) to tokens, for the template. Raises ValueError if
    the content is no tokenizer.
    With `processes` texts are encoded in those: their time may be out of proportion to the text.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        chat_template: str,
        special_tokens: Mapping[str, str],
        processes: TokenizerProcesses | None = None,
    ) -> None:
        try:
            self._tokenizer: Tokenizer = usable(Tokenizer.from_buffer(tokenizer_json))
        except CONTROL_FLOW:
            raise
        except BaseException as error:  # the library raises nothing more precise, and panics
            raise ValueError(f"the model's tokenizer.json cannot be read: {shortened(error)}") from error
        self.tokenizer_json = tokenizer_json
        self._processes = processes
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.answer_format = answer_format_of(chat_template, vocabulary)
        self._chat_template = ChatTemplate(chat_template, special_tokens) if chat_template else None
        self.longest_token_chars = max(map(len, vocabulary), default=0)
        self._has_token = _has_token(self._tokenizer)
        self._has_plain_token = _without_special_tokens(self._tokenizer, self._has_token)
        self._plain_token = _find_plain_token(self._tokenizer)
        self._pieces = TokenPieces(self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Raises InvalidRequestError for text that is not Unicode or that the vocabulary cannot spell.
        """
        return self._encode("text", text, add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        *,
        tools: str = "",
        template_kwargs: str = "",
    ) -> list[int]:
        """Token ids of a rendered conversation; special tokens are those that the template wrote.

        Raises FailedPreconditionError without a usable template, InvalidRequestError where it refuses a message, and
        for tools or further variables that are not the JSON that `ChatTemplate.render` takes.
        """
        if self._chat_template is None:
            raise FailedPreconditionError("the model has no chat template: send the prompt as text")
        text = self._chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        return self._encode("chat", text, False)

    def opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """True if a prompt ends with a tag that opens reasoning, besides whitespace."""
        try:
            tail = self.decode(prompt[-_MOST_TAG_TOKENS:], keep_special_tokens=True)
        except InvalidRequestError:  # a prompt of ids that are no text
            return False
        return tail.rstrip().endswith(OPENING_TAGS)

    def decode(self, token_ids: Sequence[int], keep_special_tokens: bool) -> str:
        """Text of token ids on their own. Ids that the vocabulary does not know have no text."""
        if token_ids and min(token_ids) < 0:
            raise refusal_of("token_ids", "has negative ids: leave them out")
        try:  # a batch of one, as in `_encode`
            return str(self._tokenizer.decode_batch([token_ids], skip_special_tokens=not keep_special_tokens)[0])
        except CONTROL_FLOW:
            raise
        except BaseException as error:  # as above
            raise refusal_of("token_ids", f"cannot be decoded by the model's tokenizer: {shortened(error)}") from error

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary spells them; empty for an id that it does not know."""
        return [self._tokenizer.id_to_token(each) or "" for each in token_ids]

    def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """Bytes that each token adds within a text; empty for an id that the vocabulary does not know."""
        return [self._pieces.piece(each) for each in token_ids]

    def with_text(self, token_ids: Sequence[int], keep_special_tokens: bool) -> list[int]:
        """Token ids with text of their own: no special tokens unless kept, no ids without a token."""
        is_shown = self._has_token if keep_special_tokens else self._has_plain_token
        return [each for each in token_ids if 0 <= each < len(is_shown) and is_shown[each]]

    def decoder(self, context: Sequence[int], *, keep_special_tokens: bool) -> IncrementalDecoder:
        """Decoder of the tokens that follow `context`, of which the last 16 suffice."""
        is_shown = self._has_token if keep_special_tokens else self._has_plain_token
        return IncrementalDecoder(
            self._tokenizer, is_shown, context, keep_special_tokens=keep_special_tokens, plain_token=self._plain_token
        )

    def _encode(self, field: str, text: str, add_special_tokens: bool) -> list[int]:
        try:  # a batch of one: unlike `encode` it lets go of the interpreter's lock
            if self._processes is not None:
                return self._processes.encode(text, add_special_tokens=add_special_tokens)
            ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return ids
        except (TypeError, UnicodeEncodeError) as error:  # a Python string that has no UTF-8
            raise refusal_of(field, "is not valid Unicode: remove the lone surrogates") from error
        except CONTROL_FLOW:
            raise
        except BaseException as error:  # the library raises nothing more precise, and panics
            raise refusal_of(field, f"cannot be encoded by the model's tokenizer: {shortened(error)}") from error


def _has_token(tokenizer: Tokenizer) -> bytes:
    """By token id: 1 where the vocabulary has a token, 0 in its holes."""
    token_ids = tokenizer.get_vocab(with_added_tokens=True).values()
    highest = max(token_ids, default=-1)
    if highest >= MAX_TOKEN_ID:
        raise ValueError(f"the model's tokenizer.json has the token id {highest:,}: give ids below {MAX_TOKEN_ID:,}")
    table = bytearray(highest + 1)
    for each in token_ids:
        table[each] = 1
    return bytes(table)


def _without_special_tokens(tokenizer: Tokenizer, has_token: bytes) -> bytes:
    table = bytearray(has_token)
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        if token.special:
            table[token_id] = 0
    return bytes(table)


def _find_plain_token(tokenizer: Tokenizer) -> int | None:
    """A token whose text is a letter or two, wherever it stands; None if the vocabulary has none, or none soon."""
    special = tokenizer.get_added_tokens_decoder().keys()
    for token_id in range(min(tokenizer.get_vocab_size(), _MOST_TRIED)):
        token = tokenizer.id_to_token(token_id)
        if token is not None and token.isascii() and token.isalpha() and token_id not in special:
            return token_id
    return None
