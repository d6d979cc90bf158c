"""The cast, things and places of a story: drawn once, then filled into the sentences of a plot.

A scene keeps names and pronouns consistent. It knows no plot: a sentence is a template with
fields such as {H} (the hero), {he}, {F} (the friend), {thing} or {place}.
"""

from dataclasses import dataclass
from random import Random

from demo import words

PRONOUNS = {"he": ("he", "him", "his", "himself"), "she": ("she", "her", "her", "herself")}


@dataclass(frozen=True, slots=True)
class Character:
    """One person or animal of a story; `kind` is what it is, such as "girl" or "fox"."""

    name: str
    kind: str
    pronoun: str


@dataclass(frozen=True, slots=True)
class Scene:
    """Two characters, the hero's relative, and the drawn fields of one plot."""

    hero: Character
    friend: Character
    relative: str
    fields: dict[str, str]


def draw_character(rng: Random) -> Character:
    """A child or an animal, with a name that fits."""
    pronoun = rng.choice(("he", "she"))
    if rng.random() < 0.5:
        names = words.ANIMAL_NAMES_HE if pronoun == "he" else words.ANIMAL_NAMES_SHE
        return Character(rng.choice(names), rng.choice(words.HERO_ANIMALS), pronoun)
    if pronoun == "he":
        return Character(rng.choice(words.BOYS), "boy", pronoun)
    return Character(rng.choice(words.GIRLS), "girl", pronoun)


def draw_cast(rng: Random) -> tuple[Character, Character, str]:
    """A hero, a friend with another name, and the hero's relative."""
    hero = draw_character(rng)
    friend = draw_character(rng)
    while friend.name == hero.name:
        friend = draw_character(rng)
    return hero, friend, rng.choice(words.KIN)


def draw_scene(rng: Random, cast: tuple[Character, Character, str]) -> Scene:
    """The cast among freshly drawn things and places."""
    hero, friend, relative = cast
    thing = f"{rng.choice(words.COLOURS)} {rng.choice(words.THINGS)}"
    skill, other_skill = rng.sample(words.SKILLS, 2)
    fields = {
        **_person_fields(hero, friend, relative),
        "thing": thing,
        "a_thing": words.with_article(thing),
        "place": f"the {rng.choice(words.PLACES)}",
        "hiding": rng.choice(words.HIDING_PLACES),
        "animal": rng.choice(words.SMALL_ANIMALS),
        "food": rng.choice(words.FOODS),
        "skill": skill,
        "other_skill": other_skill,
        "gift": rng.choice(words.GIFTS),
        "treasure": rng.choice(words.TREASURES),
        "plant": rng.choice(words.PLANTS),
        "colour": rng.choice(words.COLOURS),
        "number": rng.choice(("two", "three", "four", "five", "six", "seven")),
        "glad": rng.choice(words.GOOD_FEELINGS),
    }
    fields["a_plant"] = words.with_article(fields["plant"])
    fields["a_colour"] = words.with_article(fields["colour"])
    fields["A_colour"] = fields["a_colour"].capitalize()
    return Scene(hero, friend, relative, fields)


def _person_fields(hero: Character, friend: Character, relative: str) -> dict[str, str]:
    he, him, his, himself = PRONOUNS[hero.pronoun]
    f_he, f_him, f_his, _ = PRONOUNS[friend.pronoun]
    return {
        "H": hero.name,
        "he": he,
        "He": he.capitalize(),
        "him": him,
        "his": his,
        "His": his.capitalize(),
        "himself": himself,
        "F": friend.name,
        "fhe": f_he,
        "FHe": f_he.capitalize(),
        "fhim": f_him,
        "fhis": f_his,
        "kin": f"{his} {relative}",
        "Kin": f"{his.capitalize()} {relative}",
    }


def fill(rng: Random, template: str, scene: Scene) -> str:
    """One of the alternatives of `template` (parted by " | "), its fields filled in."""
    return rng.choice(template.split(" | ")).format_map(scene.fields)
