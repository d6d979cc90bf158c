"""Chunks cut into single tokens, so that what is made of an output does not depend on how it arrived."""

from collections.abc import Iterator
from dataclasses import replace

import quire

MOST_AT_ONCE = 64  # tokens with their likely ones, for which objects are made in a few milliseconds


def single_tokens(chunk: quire.Chunk) -> Iterator[quire.Chunk]:
    """A chunk for each token, then one for the end of the sample, with the text that was held back until then.

    The request must have asked for `text_ends`.
    """
    if chunk.num_tokens == 1 and chunk.finish is None:  # nearly all
        yield chunk
        return
    start = 0
    for number, end in enumerate(chunk.text_ends):
        yield replace(
            chunk,
            position=chunk.position + number,
            num_tokens=1,
            text=chunk.text[start:end],
            token_ids=chunk.token_ids[number : number + 1],
            logprobs=chunk.logprobs[number : number + 1],
            prompt_logprobs=() if number else chunk.prompt_logprobs,
            finish=None,
            text_ends=(end - start,),
        )
        start = end
    if chunk.finish is not None:
        yield quire.Chunk(
            index=chunk.index,
            position=chunk.position + chunk.num_tokens,
            num_tokens=0,
            text=chunk.text[start:],
            finish=chunk.finish,
        )
