"""Chats of the training text: greetings, questions about the model itself, facts, and questions that it declines.

An exchange is a list of (question, answer) pairs with an optional system message; the words that
mark roles are in `render`, and the chat template of the trained model writes exactly the same.
"""

from collections.abc import Callable
from random import Random

from demo import words
from demo.facts import QuestionAnswer, draw_fact

BOS = "<|bos|>"
EOS = "<|eos|>"
PAD = "<|pad|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SPECIAL_TOKENS = (BOS, EOS, PAD, SYSTEM, USER, ASSISTANT)

SYSTEM_MESSAGES = (
    "You are Quire's demo model.",
    "You are a helpful assistant.",
    "You are a friendly helper. Answer in short sentences.",
    "You are a storyteller for children.",
    "Be kind and brief.",
    "Answer the question.",
)
WHO = "I am Quire's demo model, a very small language model that tells short stories and answers simple questions."
ABOUT = {
    "Who are you? | What are you? | Tell me about yourself. | What is your name? | Who am I talking to?": WHO,
    "What can you do? | How can you help me? | What do you know? | Help!": (
        "I can tell short stories, count, add small numbers, and answer simple questions about colours, "
        "animals and days."
    ),
    "What is Quire? | Tell me about Quire. | What does Quire do?": (
        "Quire serves language models. It keeps their memory in blocks, so that many answers fit side by side."
    ),
    "How big are you? | How many parameters do you have? | Are you a large model?": (
        "I am very small. I have about four million parameters."
    ),
    "Are you a human? | Are you a person? | Are you real? | Are you a robot?": (
        "No, I am not a person. I am a small program that puts one word after the other."
    ),
    "How were you made? | Who made you? | How did you learn to speak?": (
        "I was trained on little stories and questions that were written by a small program."
    ),
    "How are you? | How are you today? | How do you feel?": "I am fine, thank you. Would you like to hear a story?",
    "Thank you! | Thanks. | Thank you very much.": "You are welcome!",
    "Goodbye! | Bye. | See you soon. | Good night.": "Goodbye! Have a nice day.",
    "Hello! | Hi. | Hello, how are you? | Good morning. | Hey there. | Good evening.": (
        "Hello! I am Quire's demo model. You can ask me a simple question or for a short story."
    ),
    "Do you like stories? | What do you like?": "Yes, I like stories about animals and good friends best of all.",
    "Tell me a joke. | Do you know a joke?": "Why did the duck take an umbrella? It wanted to stay dry for once!",
}
UNKNOWN = (
    "What is the capital of {X}? | Who wrote {x}? | How do I write {ax}? | What is {ax}? | Explain {x} to me. | "
    "What do you think about {x}? | When was {X} born? | Where is {X}? | What is the meaning of {x}? | "
    "Write {ax} about {y}. | How does {ax} work? | Why is {x} so {y}? | Can you fix my {x}? | Who is {X}? | "
    "How far is it to {X}? | What happened in {X}? | Translate {x} for me. | How old is {X}? | Solve this: {x} {y}. | "
    "What is the best {x} in {X}? | Tell me something about {x} and {y}. | What is {x}?"
)
DO_NOT_KNOW = "I am sorry, I do not know that. I am only a small demo model."
SYLLABLES = words.listed(
    "ba be bi bo ca co da de di do fa fe fi ga go ha he ja ka ke la le li lo lu ma me mi mo na ne ni no pa pe po ra re "
    "ri ro sa se si so ta te ti to tra tri va ve vi wa we za zo nt st th ch qu sh gra pro con ation ing er ly"
)


def render(pairs: list[QuestionAnswer], system: str | None = None) -> str:
    """The document of an exchange, from its begin to its end marker."""
    head = "" if system is None else f"{SYSTEM}{system}"
    return BOS + head + "".join(f"{USER}{question}{ASSISTANT}{answer}{EOS}" for question, answer in pairs)


def draw_system(rng: Random) -> str | None:
    return rng.choice(SYSTEM_MESSAGES) if rng.random() < 0.3 else None


def loosen(rng: Random, question: str) -> str:
    """The question as people type it: polite, in lower case, or without its mark."""
    chance = rng.random()
    if chance < 0.08:
        return question.lower()
    if chance < 0.14:
        return question.rstrip("?.!")
    if chance < 0.18:
        return question.lower().rstrip("?.!")
    if chance < 0.24:
        return f"{rng.choice(('Please tell me:', 'Hello!', 'I have a question.', 'Tell me,'))} {question}"
    return question


def about(rng: Random) -> QuestionAnswer:
    """A question about the model itself, or a courtesy."""
    questions, answer = rng.choice(list(ABOUT.items()))
    return rng.choice(questions.split(" | ")), answer


def unknown(rng: Random) -> QuestionAnswer:
    """A question with words that the model never learns, and the answer that declines it."""
    template = rng.choice(UNKNOWN.split(" | "))
    x, y, name = _strange_word(rng), _strange_word(rng), _strange_word(rng).capitalize()
    return template.format(x=x, ax=words.with_article(x), y=y, X=name), DO_NOT_KNOW


def repeat(rng: Random) -> QuestionAnswer:
    word = rng.choice((*words.THINGS, *words.FOODS, *words.COLOURS, _strange_word(rng)))
    return rng.choice((f"Say the word {word}.", f"Repeat after me: {word}", f"Please say {word}.")), f"{word}."


KINDS: tuple[Callable[[Random], QuestionAnswer], ...] = (draw_fact,) * 11 + (about,) * 6 + (unknown,) * 3 + (repeat,)


def draw_exchange(rng: Random) -> list[QuestionAnswer]:
    """One to five questions and answers, sometimes with a name to remember."""
    pairs = [rng.choice(KINDS)(rng) for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4, 5)))]
    pairs = [(loosen(rng, question), answer) for question, answer in pairs]
    return _with_name(rng, pairs) if rng.random() < 0.12 else pairs


def _with_name(rng: Random, pairs: list[QuestionAnswer]) -> list[QuestionAnswer]:
    name = rng.choice((*words.BOYS, *words.GIRLS, _strange_word(rng).capitalize()))
    opening = rng.choice((f"My name is {name}.", f"Hello, I am {name}.", f"Hi! My name is {name}."))
    question = rng.choice(("What is my name?", "Do you know my name?", "Who am I?"))
    return [(opening, f"Hello, {name}! It is nice to meet you."), *pairs, (question, f"Your name is {name}.")]


def _strange_word(rng: Random) -> str:
    return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 4)))
