"""Bytes of single tokens, for vocabularies of each kind: joined they are the text, whatever characters they part."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from scheduler_svc.text.token_pieces import TokenPieces
from tests.services import DEMO_MODEL

TEXT = "Once upon a time: naïve 👩‍👩‍👧 好 \t~"


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece() -> Tokenizer:
    """A vocabulary as those of LLaMA 2 are converted: spaces are U+2581, unknown characters bytes."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "▁a": 257, "e": 258, "n": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, fuse_unk=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def test_pieces_of_every_byte_make_any_text() -> None:
    tokenizer = byte_level()
    pieces = TokenPieces(tokenizer)
    ids = tokenizer.encode(TEXT).ids
    assert len(ids) == len(TEXT.encode())
    assert b"".join(map(pieces.piece, ids)) == TEXT.encode()


def test_pieces_of_the_demo_model_make_its_text() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    pieces = TokenPieces(tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert b"".join(map(pieces.piece, ids)).decode() == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("token_id", "piece"), [(0x0A, b"\n"), (0xE5, b"\xe5"), (256, b" "), (257, b" a"), (258, b"e"), (999, b"")]
)
def test_spelled_bytes_and_spaces(token_id: int, piece: bytes) -> None:
    assert TokenPieces(sentencepiece()).piece(token_id) == piece


@pytest.mark.parametrize(("cleanup", "comma"), [(True, b","), (False, b" ,")])
@pytest.mark.parametrize("in_a_sequence", [True, False])
def test_word_pieces_have_the_spaces_of_their_text(cleanup: bool, comma: bytes, in_a_sequence: bool) -> None:
    vocabulary = {"[UNK]": 0, "play": 1, "##ing": 2, "now": 3, ",": 4}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    decoder = decoders.WordPiece(cleanup=cleanup)
    tokenizer.decoder = decoders.Sequence([decoder, decoders.Fuse()]) if in_a_sequence else decoder
    pieces = TokenPieces(tokenizer)
    ids = tokenizer.encode("playing, now").ids
    assert [pieces.piece(each) for each in ids] == [b" play", b"ing", comma, b" now"]
    assert b"".join(map(pieces.piece, ids)).decode().lstrip() == tokenizer.decode(ids)
    assert pieces.piece(99) == b""


def test_other_spellings_of_spaces() -> None:
    tokenizer = Tokenizer(models.WordLevel(vocab={"_a": 0, "b</w>": 1}, unk_token="_a"))
    tokenizer.decoder = decoders.Metaspace(replacement="_")
    assert TokenPieces(tokenizer).piece(0) == b" a"
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    assert TokenPieces(tokenizer).piece(1) == b"b "
    tokenizer.decoder = None
    assert TokenPieces(tokenizer).piece(1) == b"b</w>"


def test_added_tokens_are_spelled_as_they_are() -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        tokenizer.add_special_tokens([AddedToken("<|é▁end|>", special=True)])
        [token_id] = tokenizer.get_added_tokens_decoder()
        assert TokenPieces(tokenizer).piece(token_id) == "<|é▁end|>".encode()
