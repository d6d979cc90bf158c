"""Bytes of single tokens, for log-probabilities by token: a token may be a part of a character, which text cannot show.

Reads the tokenizer's decoder: byte-level vocabularies spell each byte as a character, others spell single bytes as
`<0x0A>` and a space as `▁`, which is U+2581; those of word pieces mark what continues a word, `##`, and have no spaces.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer, decoders

_SPELLED_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenPieces:
    """Spelling of a vocabulary in bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        steps = list(_decoding_steps(tokenizer))
        kinds = {step.get("type") for step in steps}
        self._bytes_of = _byte_level_alphabet() if "ByteLevel" in kinds else None
        self._has_spelled_bytes = "ByteFallback" in kinds
        self._word_pieces = next(map(_word_pieces, (step for step in steps if step.get("type") == "WordPiece")), None)
        self._replacements = [each for step in steps for each in _replacements(step)]

    def piece(self, token_id: int) -> bytes:
        """Bytes that a token adds within a text; empty for an id without a token."""
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        spelled: str = self._tokenizer.id_to_token(token_id) or ""
        if self._bytes_of is not None:
            alphabet = self._bytes_of
            return b"".join(alphabet.get(each) or each.encode() for each in spelled)
        if self._has_spelled_bytes and (found := _SPELLED_BYTE.fullmatch(spelled)):
            return bytes([int(found[1], 16)])
        if self._word_pieces is not None and spelled:
            return str(self._word_pieces.decode(["", spelled])).encode()  # behind another: the first gets no space
        for before, after in self._replacements:
            spelled = spelled.replace(before, after)
        return spelled.encode()


def _decoding_steps(tokenizer: Tokenizer) -> Iterator[Mapping[str, Any]]:
    """The decoder's steps as tokenizer.json has them; none without a decoder."""
    if tokenizer.decoder is None:
        return
    decoder = json.loads(tokenizer.decoder.__getstate__())
    yield from decoder["decoders"] if decoder["type"] == "Sequence" else (decoder,)


def _word_pieces(step: Mapping[str, Any]) -> decoders.WordPiece:
    """The step alone, which puts spaces between words, and with `cleanup` none before signs."""
    return decoders.WordPiece(prefix=step["prefix"], cleanup=step["cleanup"])


def _replacements(step: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Replacements that a step makes whatever the other tokens are."""
    match step.get("type"):
        case "Replace" if "String" in step["pattern"]:
            yield step["pattern"]["String"], step["content"]
        case "Metaspace":
            yield step["replacement"], " "
        case "BPEDecoder":
            yield step["suffix"], " "


def _byte_level_alphabet() -> dict[str, bytes]:
    """The byte for each character of a byte-level vocabulary, as GPT-2 defines them.

    Printable characters of Latin-1 stand for themselves, the other bytes in turn for those from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): bytes([byte]) for byte in printable},
        **{chr(0x100 + number): bytes([byte]) for number, byte in enumerate(others)},
    }
