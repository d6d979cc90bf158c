"""The endless training text of the demo model: stories, stories with questions, and chats, drawn by one seed.

A document is one complete string that begins and ends with its markers.
Knows nothing of tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from demo import words
from demo.chats import BOS, EOS, draw_exchange, draw_system, loosen, render
from demo.facts import QuestionAnswer, draw_fact
from demo.more_story_plots import PLOTS
from demo.scene import Character, Scene, draw_cast, draw_scene, fill

OPENINGS = (
    "Once upon a time there was {hero}. | Once there was {hero}. | There once was {hero}. | "
    "This is the story of {hero}. | Once upon a time, near {place}, there lived {hero}. | "
    "{Hero} lived near {place}."
)
HOMES = (
    "{H} lived in a small house near {place}. | {He} lived with {kin} close to {place}. | "
    "{His} home was {a_colour} house at the edge of the village. | {H} lived in the village with {kin}."
)
LIKES = (
    "{H} liked to {skill}. | Most of all {he} liked {food}. | "
    "{He} had {a_thing} that {he} took everywhere. | "
    "{He} liked to {skill} and to {other_skill}. | {His} favourite colour was {colour}."
)
FRIENDS = (
    "{His} best friend was {friend}. | {H} had a good friend, {friend}. | "
    "{He} often played with {friend}. | Next door lived {friend}, and they were good friends."
)
ENDINGS = (
    "When the sun went down, they went home. | {H} told {kin} all about it. | "
    "That night {H} slept very well. | "
    "{H} and {F} were {glad}. | In the evening they sat together and ate {food}. | It was a day to remember."
)
LAST_LINES = "The end. | And so the story ends. | That is the end of the story. | And they were all happy."


@dataclass(frozen=True, slots=True)
class Story:
    """A told story and the questions that it answers."""

    text: str
    hero: Character
    questions: tuple[QuestionAnswer, ...]


def documents(seed: int) -> Iterator[str]:
    """Documents without end; the same seed gives the same documents."""
    rng = Random(seed)
    while True:
        yield rng.choices(tuple(_KINDS), weights=tuple(_KINDS.values()))[0](rng)


def draw_story(rng: Random, num_plots: int) -> Story:
    """A story of `num_plots` plots with the same characters; no plot comes twice."""
    cast = draw_cast(rng)
    parts = [_opening(rng, draw_scene(rng, cast))]
    questions: list[QuestionAnswer] = []
    for number, plot in enumerate(rng.sample(PLOTS, num_plots)):
        scene = draw_scene(rng, cast)
        when = f"{rng.choice(words.LATER)}," if number else rng.choice(words.TIMES)
        sentences = " ".join(fill(rng, step, scene) for step in plot.steps)
        parts.append(f"{when} {_new_day(rng)} {sentences}")
        questions += [(q.format_map(scene.fields), a.format_map(scene.fields)) for q, a in plot.questions]
    parts.append(_ending(rng, draw_scene(rng, cast)))
    separator = "\n\n" if num_plots > 1 else " "
    return Story(separator.join(parts), cast[0], tuple((q, _sentence(a)) for q, a in questions))


def _new_day(rng: Random) -> str:
    weather = rng.choice(words.WEATHER)
    return f"{weather[0].lower()}{weather[1:]}."


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


def _introduce(rng: Random, character: Character, relation: str) -> str:
    kind = words.with_article(f"{rng.choice(words.TRAITS)} {character.kind}")
    return f"{kind} {relation} {character.name}"


def _opening(rng: Random, scene: Scene) -> str:
    hero = _introduce(rng, scene.hero, rng.choice(("named", "called")))
    friend = _introduce(rng, scene.friend, "named")
    first = rng.choice(OPENINGS.split(" | ")).format_map({**scene.fields, "hero": hero, "Hero": _sentence(hero)})
    known = rng.choice(FRIENDS.split(" | ")).format_map({**scene.fields, "friend": friend})
    middle = [fill(rng, template, scene) for template in rng.sample((HOMES, LIKES), rng.randint(0, 2))]
    return " ".join((first, *middle, known))


def _ending(rng: Random, scene: Scene) -> str:
    close = [fill(rng, ENDINGS, scene)]
    if rng.random() < 0.5:
        close.append(f"{scene.hero.name} had learned that {rng.choice(words.LESSONS)}.")
    return " ".join((*close, rng.choice(LAST_LINES.split(" | "))))


def _short_story(rng: Random) -> str:
    return BOS + draw_story(rng, rng.choice((1, 1, 1, 2))).text + EOS


def _long_story(rng: Random) -> str:
    return BOS + draw_story(rng, rng.randint(3, 8)).text + EOS


def _excerpt(rng: Random) -> str:
    """A story from its middle on, so that any sentence can be a prompt."""
    sentences = draw_story(rng, 1).text.split(". ")
    return BOS + ". ".join(sentences[rng.randrange(1, len(sentences) - 1) :]) + EOS


def _story_with_questions(rng: Random) -> str:
    story = draw_story(rng, rng.choice((1, 1, 2)))
    asked = rng.sample(story.questions, rng.randint(1, 3))
    lines = "".join(f"\n\nQuestion: {question}\nAnswer: {answer}" for question, answer in asked)
    return BOS + story.text + lines + EOS


def _facts(rng: Random) -> str:
    asked = [draw_fact(rng) for _ in range(rng.randint(1, 5))]
    return BOS + "\n\n".join(f"Question: {question}\nAnswer: {answer}" for question, answer in asked) + EOS


def _chat(rng: Random) -> str:
    return render(draw_exchange(rng), draw_system(rng))


def _chat_story(rng: Random) -> str:
    """A chat in which the user asks for a story, sometimes about a character, then sometimes a question about it."""
    story = draw_story(rng, 1)
    kind = words.with_article(story.hero.kind)
    name = story.hero.name
    topics = ("", f" about {kind}", f" about {kind}", f" about {name}", f" about {kind} named {name}")
    wishes = ("Tell me a story{}.", "Please tell me a story{}.", "Write a short story{}.", "I want a story{}.")
    pairs = [(loosen(rng, rng.choice(wishes).format(rng.choice(topics))), story.text)]
    pairs += rng.sample(story.questions, rng.randint(0, 2))
    return render(pairs, draw_system(rng))


def _chat_reading(rng: Random) -> str:
    """A chat in which the user gives a story and asks a question about it."""
    story = draw_story(rng, 1)
    (question, answer), *rest = rng.sample(story.questions, rng.randint(1, 3))
    return render([(f"{story.text}\n\n{question}", answer), *rest], draw_system(rng))


_KINDS: dict[Callable[[Random], str], int] = {
    _short_story: 20,
    _long_story: 10,
    _excerpt: 8,
    _story_with_questions: 12,
    _facts: 16,
    _chat: 50,
    _chat_story: 16,
    _chat_reading: 10,
}
