"""Conversations that do not fit into the model's context, cut to their last turns."""

from collections.abc import Callable, Sequence

import quire

Turns = Sequence[quire.ChatMessage]


async def last_turns_that_fit(
    client: quire.AsyncClient, chat: Callable[[Turns], quire.Chat], instructions: Turns, turns: Turns, most_tokens: int
) -> list[quire.ChatMessage]:
    """The instructions and as many of the last turns as `most_tokens` hold, beginning with one of the user's.

    `chat` makes the conversation of some turns. At least the user's last turn is kept, whether or not it fits. Raises
    QuireError if the prompt cannot be tokenized.
    """
    later = [place for place, turn in enumerate(turns) if place and turn.role == "user"]
    begins = [0, *later]
    low, high = 0, len(begins) - 1  # the first place in `begins` that fits lies within
    while low < high:
        middle = (low + high) // 2
        if await _fits(client, chat([*instructions, *turns[begins[middle] :]]), most_tokens):
            high = middle
        else:
            low = middle + 1
    return [*instructions, *turns[begins[low] :]]


async def _fits(client: quire.AsyncClient, chat: quire.Chat, most_tokens: int) -> bool:
    try:
        return len((await client.tokenize(chat)).token_ids) <= most_tokens
    except quire.InvalidRequestError:  # longer than any prompt
        return False
