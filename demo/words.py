"""The words of the demo grammar: names, animals, places, things and the like.

Only data and the choice of an article; knows no sentences.
"""


def listed(text: str) -> tuple[str, ...]:
    """The words of `text`."""
    return tuple(text.split())


def phrases(text: str) -> tuple[str, ...]:
    """The parts of `text` between bars."""
    return tuple(text.split("|"))


def with_article(noun: str) -> str:
    """The noun with its article, "a" or "an" by its first sound."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


BOYS = listed("Tom Ben Sam Leo Max Finn Otto Paul Hugo Emil Jack Noah Oscar Felix Theo Luke Anton Milo Karl Peter")
GIRLS = listed("Mia Anna Lily Rosa Nora Ella Clara Ida Emma Lucy Greta Maya Ruth Lena Alice Zoe Hanna Olive Sara Vera")
ANIMAL_NAMES_HE = listed("Pip Bruno Rusty Toby Hops Bolt Muffin Acorn Rocky Dusty")
ANIMAL_NAMES_SHE = listed("Daisy Luna Hazel Poppy Misty Ruby Clover Pearl Honey Willow")

HERO_ANIMALS = listed(
    "fox rabbit bear mouse cat dog squirrel hedgehog duck frog owl badger otter pony dragon elephant monkey wolf lion "
    "penguin turtle goose"
)
SMALL_ANIMALS = listed("bird kitten puppy duckling mouse hedgehog squirrel rabbit turtle lamb")

TRAITS = listed("little kind clever brave shy curious funny quiet cheerful gentle small lazy")
COLOURS = listed("red blue green yellow white black brown orange purple grey pink golden silver")
THINGS = listed(
    "ball kite hat scarf cup box boat bell drum book basket lamp key ring coat bag doll flute spoon umbrella button "
    "whistle feather shell lantern blanket wagon mirror ribbon pencil"
)
PLACES = phrases(
    "park|forest|garden|market|school|river|lake|hill|beach|farm|village|meadow|old mill|library|harbour|playground|"
    "castle|bridge|bakery|barn"
)
HIDING_PLACES = phrases(
    "under the old bench|behind the big tree|inside a hollow log|beside the well|under the bed|on top of the wall|"
    "between two stones|behind the door|in the tall grass|under the stairs|near the gate|in the hay|"
    "behind the red barn|under a pile of leaves"
)
FOODS = phrases(
    "bread|soup|cake|cheese|honey|apples|berries|nuts|porridge|carrots|pancakes|cookies|pears|fish|jam|corn"
)
KIN = listed("mother father grandmother grandfather aunt uncle")
SKILLS = phrases(
    "swim|whistle|sing|dance|read|paint|skate|climb trees|ride a bike|bake bread|fly a kite|play the flute|catch fish|"
    "build a fire|row a boat"
)
GIFTS = phrases(
    "a warm scarf|a little wooden boat|a paper star|a picture of the sea|a jar of honey|a song|a big cake|"
    "a bag of nuts|a new hat|a small garden|a soft pillow|a book of stories"
)
TREASURES = phrases(
    "an old golden coin|a pile of shiny stones|a silver bell|a book with a blue cover|a tiny music box|"
    "a note that said well done|a bag of sweets|seeds for a new garden|a small brass key"
)
PLANTS = phrases("sunflower|rose|tulip|apple tree|pear tree|pumpkin|bean plant|cherry tree|lily|oak")
TIMES = phrases(
    "One morning|One day|One afternoon|One evening|On a Monday|On a Sunday|One sunny day|One cold morning|"
    "On a warm day|One windy day|Early one morning|On a Friday|One Saturday"
)
WEATHER = phrases(
    "The sun was shining|The sky was blue|It was a windy day|It was warm and bright|Small clouds moved over the sky|"
    "The air was cold and clear|Birds were singing|A soft wind blew|The grass was still wet|It was a quiet day"
)
LATER = phrases(
    "The next day|A week later|Some days later|Soon after that|The next morning|When the week was over|"
    "A few days later|Not long after|On the following day|Two days later"
)
GOOD_FEELINGS = listed("happy glad proud thankful cheerful calm")
LESSONS = phrases(
    "friends help each other|it is good to share|it is best to tell the truth|small steps lead far|"
    "being kind is never wrong|a brave heart can do much|it is fine to ask for help|patience pays off|"
    "every day brings something new|working together makes things easy|a mistake is a chance to learn"
)
