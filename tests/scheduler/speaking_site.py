"""Gives the model of a serving site a tokenizer: one that works, or one that cannot spell a certain token."""

from collections.abc import Sequence
from dataclasses import replace

from scheduler_svc.text.incremental_decoder import IncrementalDecoder
from scheduler_svc.text.tokenizer import ModelTokenizer
from tests.scheduler.serving_site import Site
from tests.scheduler.text_tokenizers import SPECIAL_TOKENS, byte_level_json

BAD_TOKEN = 207


class StumblingDecoder(IncrementalDecoder):
    def push(self, token_id: int) -> str:
        if token_id == BAD_TOKEN:
            raise RuntimeError("no text for this one")
        return super().push(token_id)


class StumblingTokenizer(ModelTokenizer):
    def decoder(self, context: Sequence[int], *, keep_special_tokens: bool) -> IncrementalDecoder:
        is_shown = bytes([1]) * 1000
        return StumblingDecoder(self._tokenizer, is_shown, context, keep_special_tokens=keep_special_tokens)


def make_stumbling(site: Site) -> None:
    """Make text decoding fail if `BAD_TOKEN` is in the output."""
    _set_tokenizer(site, StumblingTokenizer(byte_level_json(), "", SPECIAL_TOKENS))


def make_speaking(site: Site) -> ModelTokenizer:
    """Give the site a tokenizer of some 480 tokens."""
    tokenizer = ModelTokenizer(byte_level_json(), "", SPECIAL_TOKENS)
    _set_tokenizer(site, tokenizer)
    return tokenizer


def _set_tokenizer(site: Site, tokenizer: ModelTokenizer) -> None:
    model = site.admission.model
    assert model is not None, "a worker comes first"
    site.admission.model = replace(model, tokenizer=tokenizer, limits=replace(model.limits, has_tokenizer=True))
