"""Lengths that the paper does not give: of translations, and of conversations. All of it is assumed, and stated.

A sentence pair has log-normal lengths. A conversation is made of ShareGPT's inputs and outputs, round after round; a
request's prompt is all that was said before and the new input, cut to its last 1,024 tokens, and nothing is kept
between rounds.
"""

from dataclasses import dataclass
from math import exp
from random import Random

from benchmarks.lengths import Lengths
from benchmarks.paper.trace import SEED, Draw, paper_lengths

SPREAD = 0.5  # standard deviation of the logarithm of a sentence's length
SHORTEST, LONGEST = 4, 256  # sentences, in tokens
MAX_PROMPT = MAX_ANSWER = 1024  # of a chatbot's request, as the paper cut them


@dataclass(frozen=True, slots=True)
class Translation:
    """Mean tokens of a sentence to translate, and of its translation."""

    num_input: float
    num_output: float


# English sentences of newswire have some 25 words. German takes more tokens in LLaMA's vocabulary.
TRANSLATIONS = {"30 in, 40 out": Translation(30, 40), "25 in, 25 out": Translation(25, 25)}
# Mean rounds of a conversation; None: all are so long that every prompt is cut, as the paper says of most.
CHATS: dict[str, float | None] = {"every prompt 1,024 tokens": None, "4 rounds on average": 4.0}


def translation_lengths(name: str, seed: int = SEED) -> Draw:
    """Draw lengths without the prefix that all prompts share."""
    mean = TRANSLATIONS[name]
    random = Random(seed)

    def length(mean: float) -> int:
        drawn = mean * exp(SPREAD * random.gauss(0, 1) - SPREAD**2 / 2)
        return min(LONGEST, max(SHORTEST, round(drawn)))

    return lambda number: [Lengths(length(mean.num_input), length(mean.num_output)) for _ in range(number)]


def chat_lengths(name: str, seed: int = SEED) -> Draw:
    """Draw the requests of conversations, one conversation after another; their order decides nothing."""
    mean_rounds = CHATS[name]
    random = Random(seed)
    said = 0  # tokens of the present conversation

    def request(each: Lengths) -> Lengths:
        nonlocal said
        num_output = min(MAX_ANSWER, each.num_output)
        if mean_rounds is None:
            return Lengths(MAX_PROMPT, num_output)
        num_input = min(MAX_PROMPT, said + each.num_input)
        said += each.num_input + each.num_output
        if random.random() < 1 / mean_rounds:
            said = 0
        return Lengths(num_input, num_output)

    draw = paper_lengths("sharegpt", seed)
    return lambda number: [request(each) for each in draw(number)]
