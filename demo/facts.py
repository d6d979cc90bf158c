"""Simple questions with one right answer: colours, sounds, days, sums, opposites and the like.

Each drawing function returns a (question, answer) pair. No story is known here.
"""

from collections.abc import Callable
from random import Random

from demo.words import listed, with_article

COLOUR_OF = {
    "the sky": "blue", "the sea": "blue", "grass": "green", "a leaf": "green", "a frog": "green",
    "snow": "white", "milk": "white", "a cloud": "white", "the sun": "yellow", "a lemon": "yellow",
    "a banana": "yellow", "a tomato": "red", "a strawberry": "red", "a cherry": "red", "coal": "black",
    "the night": "black", "a carrot": "orange", "a pumpkin": "orange", "a plum": "purple",
    "an elephant": "grey", "chocolate": "brown", "wood": "brown", "a pig": "pink", "a chick": "yellow",
    "blood": "red",
}  # fmt: skip
SOUND_OF = {
    "dog": ("barks", "woof"), "cat": ("meows", "meow"), "cow": ("moos", "moo"), "sheep": ("bleats", "baa"),
    "duck": ("quacks", "quack"), "pig": ("grunts", "oink"), "horse": ("neighs", "neigh"),
    "lion": ("roars", "roar"), "bee": ("buzzes", "buzz"), "owl": ("hoots", "hoo"),
    "frog": ("croaks", "ribbit"), "rooster": ("crows", "cock-a-doodle-doo"), "mouse": ("squeaks", "squeak"),
    "wolf": ("howls", "awoo"), "snake": ("hisses", "hiss"), "donkey": ("brays", "hee-haw"),
    "hen": ("clucks", "cluck"), "bird": ("sings", "tweet"),
}  # fmt: skip
YOUNG_OF = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "duck": "duckling", "pig": "piglet",
    "horse": "foal", "lion": "cub", "bear": "cub", "hen": "chick", "frog": "tadpole", "goat": "kid",
    "goose": "gosling",
}  # fmt: skip
HOME_OF = {
    "bird": "in a nest", "bee": "in a hive", "fish": "in the water", "fox": "in a den",
    "rabbit": "in a burrow", "horse": "in a stable", "bear": "in a cave", "frog": "near a pond",
    "squirrel": "in a tree", "spider": "in a web", "cow": "on a farm", "lion": "in the grassland",
    "whale": "in the sea", "penguin": "on the ice", "camel": "in the desert", "owl": "in a hollow tree",
}  # fmt: skip
LEGS_OF = {
    "dog": 4, "cat": 4, "cow": 4, "horse": 4, "bird": 2, "duck": 2, "spider": 8, "bee": 6, "ant": 6,
    "snake": 0, "fish": 0, "frog": 4, "mouse": 4, "hen": 2, "beetle": 6,
}  # fmt: skip
OPPOSITES = dict(
    pair.split(":")
    for pair in listed(
        "hot:cold big:small up:down day:night happy:sad fast:slow light:dark open:closed left:right "
        "wet:dry old:young full:empty hard:soft loud:quiet good:bad tall:short rich:poor early:late "
        "near:far high:low strong:weak clean:dirty sweet:sour black:white begin:end inside:outside "
        "thick:thin heavy:light true:false deep:shallow wide:narrow easy:difficult first:last "
        "always:never"
    )
)
DAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = listed("January February March April May June July August September October November December")
SEASONS = listed("spring summer autumn winter")
NUMBERS = listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)
USES = {
    "spoon": "eat soup", "knife": "cut bread", "pencil": "write and draw",
    "umbrella": "stay dry in the rain", "key": "open a door", "lamp": "see in the dark", "bed": "sleep",
    "chair": "sit", "clock": "know the time", "broom": "clean the floor", "book": "read stories",
    "coat": "keep warm", "cup": "drink tea", "boat": "cross the water", "ladder": "climb up high",
    "needle": "sew clothes", "bike": "ride along the road", "oven": "bake bread",
}  # fmt: skip
SIZES = listed("ant bee mouse frog duck cat dog sheep horse elephant whale")
AMOUNTS = {
    "days are in a week": "There are seven days in a week.",
    "months are in a year": "There are twelve months in a year.",
    "seasons are in a year": "There are four seasons in a year.",
    "hours are in a day": "There are twenty-four hours in a day.",
    "minutes are in an hour": "There are sixty minutes in an hour.",
    "fingers are on one hand": "There are five fingers on one hand.",
    "wheels does a bike have": "A bike has two wheels.",
    "wheels does a car have": "A car has four wheels.",
    "eyes do you need to wink": "You need one eye to wink.",
    "sides does a triangle have": "A triangle has three sides.",
    "corners does a square have": "A square has four corners.",
}
LISTS = (("days of the week", DAYS), ("months of the year", MONTHS), ("four seasons", SEASONS))

QuestionAnswer = tuple[str, str]


def colour(rng: Random) -> QuestionAnswer:
    thing, name = rng.choice(list(COLOUR_OF.items()))
    word = rng.choice(("colour", "colour", "color"))
    question = rng.choice((f"What {word} is {thing}?", f"Which {word} has {thing}?", f"What is the {word} of {thing}?"))
    return question, f"{thing[0].upper()}{thing[1:]} is {name}."


def sound(rng: Random) -> QuestionAnswer:
    animal, (verb, noise) = rng.choice(list(SOUND_OF.items()))
    kind = with_article(animal)
    if rng.random() < 0.3:
        return f'Which animal says "{noise}"?', f'{kind.capitalize()} says "{noise}".'
    question = rng.choice((f"What sound does {kind} make?", f"What does {kind} say?", f"What noise does {kind} make?"))
    return question, f'{kind.capitalize()} {verb}. It says "{noise}".'


def young(rng: Random) -> QuestionAnswer:
    animal, name = rng.choice(list(YOUNG_OF.items()))
    question = rng.choice((f"What is a young {animal} called?", f"What do you call a baby {animal}?"))
    return question, f"A young {animal} is called {with_article(name)}."


def home(rng: Random) -> QuestionAnswer:
    animal, place = rng.choice(list(HOME_OF.items()))
    kind = with_article(animal)
    question = rng.choice((f"Where does {kind} live?", f"Where is the home of {kind}?"))
    return question, f"{kind.capitalize()} lives {place}."


def legs(rng: Random) -> QuestionAnswer:
    animal, count = rng.choice(list(LEGS_OF.items()))
    kind = with_article(animal)
    number = "no" if count == 0 else NUMBERS[count]
    return f"How many legs does {kind} have?", f"{kind.capitalize()} has {number} legs."


def opposite(rng: Random) -> QuestionAnswer:
    pair = list(rng.choice(list(OPPOSITES.items())))
    if pair[1] != "light":  # "light" has two opposites: ask for it only as the opposite of dark
        rng.shuffle(pair)
    word, other = pair
    question = rng.choice((f"What is the opposite of {word}?", f"What is the opposite of the word {word}?"))
    return question, f"The opposite of {word} is {other}."


def neighbour(rng: Random) -> QuestionAnswer:
    """The day, month or season before or after another one."""
    noun, cycle = rng.choice((("day", DAYS), ("day", DAYS), ("month", MONTHS), ("season", SEASONS)))
    index = rng.randrange(len(cycle))
    here = cycle[index]
    if rng.random() < 0.6:
        there = cycle[(index + 1) % len(cycle)]
        question = rng.choice((f"Which {noun} comes after {here}?", f"What {noun} comes after {here}?"))
        return question, f"After {here} comes {there}."
    return f"Which {noun} comes before {here}?", f"Before {here} comes {cycle[index - 1]}."


def plus(rng: Random) -> QuestionAnswer:
    first, second = rng.randint(0, 10), rng.randint(0, 10)
    if rng.random() < 0.3:
        a, b, total = NUMBERS[first], NUMBERS[second], NUMBERS[first + second]
        return f"What is {a} plus {b}?", f"{a.capitalize()} plus {b} is {total}."
    question = rng.choice((f"What is {first} plus {second}?", f"What is {first} + {second}?"))
    return question, f"{first} plus {second} is {first + second}."


def minus(rng: Random) -> QuestionAnswer:
    first = rng.randint(0, 10)
    second = rng.randint(0, first)
    question = rng.choice((f"What is {first} minus {second}?", f"What is {first} - {second}?"))
    return question, f"{first} minus {second} is {first - second}."


def count_to(rng: Random) -> QuestionAnswer:
    end = rng.randint(3, 20)
    if rng.random() < 0.4:
        end = rng.randint(3, 12)
        return f"Count from {end} down to 1.", ", ".join(str(n) for n in range(end, 0, -1)) + "."
    question = rng.choice((f"Count to {end}.", f"Count from 1 to {end}.", f"Can you count to {end}?"))
    return question, ", ".join(str(n) for n in range(1, end + 1)) + "."


def next_number(rng: Random) -> QuestionAnswer:
    number = rng.randint(0, 98)
    if rng.random() < 0.3:
        return f"What number comes before {number + 1}?", f"Before {number + 1} comes {number}."
    return f"What number comes after {number}?", f"After {number} comes {number + 1}."


def use(rng: Random) -> QuestionAnswer:
    tool, purpose = rng.choice(list(USES.items()))
    kind = with_article(tool)
    question = rng.choice((f"What is {kind} for?", f"What do you do with {kind}?", f"Why do people need {kind}?"))
    return question, f"With {kind} you can {purpose}."


def bigger(rng: Random) -> QuestionAnswer:
    small, large = sorted(rng.sample(range(len(SIZES)), 2))
    pair = [with_article(SIZES[small]), with_article(SIZES[large])]
    answer = f"{pair[1].capitalize()} is bigger than {pair[0]}."
    rng.shuffle(pair)
    return f"What is bigger, {pair[0]} or {pair[1]}?", answer


def amount(rng: Random) -> QuestionAnswer:
    thing, answer = rng.choice(list(AMOUNTS.items()))
    return f"How many {thing}?", answer


def listing(rng: Random) -> QuestionAnswer:
    noun, names = rng.choice(LISTS)
    head = rng.choice(("Name the", "Tell me the", "What are the"))
    mark = "?" if head == "What are the" else "."
    return f"{head} {noun}{mark}", f"The {noun} are {', '.join(names[:-1])} and {names[-1]}."


KINDS: tuple[Callable[[Random], QuestionAnswer], ...] = (
    colour, colour, sound, sound, young, home, legs, opposite, opposite, neighbour, neighbour,
    plus, plus, plus, minus, minus, count_to, next_number, use, bigger, amount, listing,
)  # fmt: skip


def draw_fact(rng: Random) -> QuestionAnswer:
    """One question of any kind, and its answer."""
    return rng.choice(KINDS)(rng)
