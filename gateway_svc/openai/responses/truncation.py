"""Conversations that do not fit into the model's context, cut to their last turns."""

from collections.abc import Callable, Sequence

import quire

ANSWER_PART = 4  # of the context one part is left to an answer that has no bound of its own

Turns = Sequence[quire.ChatMessage]


async def last_turns_that_fit(
    client: quire.AsyncClient,
    chat: Callable[[Turns], quire.Chat],
    turns: Turns,
    most_tokens: int,
    *,
    begins_anywhere: bool = False,
) -> list[quire.ChatMessage]:
    """The last turns, as many as `most_tokens` hold, beginning with one of the user's, as chat templates need it.

    The first may be anyone's, `begins_anywhere`, where no template gets them as turns. `chat` makes the conversation of
    some turns. What begins last is kept, whether or not it fits. Raises QuireError if the prompt cannot be tokenized.
    """
    later = [place for place, turn in enumerate(turns) if place and (begins_anywhere or turn.role == "user")]
    begins = [0, *later]
    low, high = 0, len(begins) - 1  # the first place in `begins` that fits lies within
    while low < high:
        middle = (low + high) // 2
        if await _fits(client, chat(turns[begins[middle] :]), most_tokens):
            high = middle
        else:
            low = middle + 1
    return list(turns[begins[low] :])


async def _fits(client: quire.AsyncClient, chat: quire.Chat, most_tokens: int) -> bool:
    try:
        return len((await client.tokenize(chat)).token_ids) <= most_tokens
    except quire.InvalidRequestError:  # longer than any prompt
        return False
