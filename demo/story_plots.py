"""Plots of stories with cause and effect, as tables of sentence templates, and questions about each: the first half.

A step has alternatives separated by " | "; the fields in braces come from a scene.
All alternatives tell the same event, so every question has one right answer.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plot:
    """The steps of a plot in order, and (question, answer) pairs that hold after the last step."""

    steps: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]


LOST = Plot(
    (
        "{H} had {a_thing}. | {H} loved {his} {thing} very much. | {Kin} gave {H} {a_thing}.",
        ("{He} took it to {place}, and there {he} lost it. | But after a walk to {place}, the {thing} was gone."),
        "{H} looked here and there, but {he} could not find it. | {He} searched everywhere and began to cry.",
        '"Do not worry," said {F}. "We will look together." | "I will help you," said {F}.',
        (
            "At last {F} found the {thing} {hiding}. | "
            "They looked for a long time, and then {F} saw the {thing} {hiding}."
        ),
        '"Thank you!" said {H}, and {he} held it tight. | {H} was so {glad} that {he} jumped up and down.',
    ),
    (
        ("What did {H} lose?", "{H} lost {his} {thing}."),
        ("Where was the {thing}?", "It was {hiding}."),
        ("Who found the {thing}?", "{F} found the {thing}."),
    ),
)
RAIN = Plot(
    (
        "{H} and {F} went to {place}. | {H} wanted to play with {F} at {place}.",
        "Soon the sky turned grey, and it began to rain. | Then dark clouds came, and rain fell on them.",
        ("They had no umbrella, so they ran and sat {hiding}. | They got wet and cold, so they sat down {hiding}."),
        (
            "To pass the time, {H} told a funny story about a {animal}. | "
            "While they waited, {H} sang a song about a {animal}."
        ),
        (
            "When the rain stopped, they saw a rainbow. | "
            "After a while the sun came back, and there was a rainbow over the hills."
        ),
        '"The rain was worth it," said {F}. | "How pretty!" said {F}, and {fhe} clapped.',
    ),
    (
        ("Where did {H} and {F} go?", "They went to {place}."),
        ("Where did they wait?", "They waited {hiding}."),
        ("What did they see after the rain?", "They saw a rainbow."),
    ),
)
HUNGRY = Plot(
    (
        "{H} was eating {food} near {place}. | {H} sat down near {place} to eat {his} {food}.",
        "Then {F} came by and looked at the {food}. | {F} came along the road and looked tired.",
        '"I have had nothing to eat today," said {F}. | "I am so hungry," said {F} in a low voice.',
        (
            "{H} thought about it, and then gave {F} half of the {food}. | "
            "{H} did not wait. {He} gave {F} half of the {food}."
        ),
        "They ate together, and it tasted better than before. | {F} smiled, and they ate side by side.",
        'After that {F} said, "Next time I will share with you." | "You are a true friend," said {F}.',
    ),
    (
        ("What was {H} eating?", "{H} was eating {food}."),
        ("Who was hungry?", "{F} was hungry."),
        ("What did {H} do?", "{H} gave {F} half of the {food}."),
    ),
)
HURT = Plot(
    (
        ("On the way to {place}, {H} heard a sad sound. | {H} was walking to {place} when {he} heard a soft cry."),
        "A {animal} lay {hiding}. Its leg was hurt. | {He} found a {animal} {hiding}, and it could not walk.",
        ("{H} picked it up with care and took it home. | Very gently {H} put it in a basket and carried it home."),
        (
            "{Kin} washed the leg, and {H} gave the {animal} {food}. | "
            "There {he} gave it water and {food}, and {kin} tied a cloth around the leg."
        ),
        (
            "After {number} days the {animal} could run again. | "
            "The {animal} slept a lot, and after {number} days it was well."
        ),
        "From then on it came to visit {H} every morning. | It looked back once, as if to say thank you.",
    ),
    (
        ("What did {H} find?", "{H} found a {animal} with a hurt leg."),
        ("What did {H} give the {animal}?", "{H} gave it {food}."),
        ("When was the {animal} well again?", "It was well after {number} days."),
    ),
)
STUCK = Plot(
    (
        "{H} was playing with {a_thing} at {place}. | {H} took {a_thing} to {place} to play.",
        ("A strong wind came and threw it high into a tree. | {He} threw it too high, and it got stuck in a tree."),
        (
            "{H} jumped and jumped, but the tree was too tall. | "
            "{He} shook the tree, but nothing fell down except leaves."
        ),
        "{F} saw this and came with a long ladder. | Then {F} had an idea and brought a ladder.",
        "{H} held the ladder while {F} climbed up. | Step by step {F} climbed up, and {H} held the ladder.",
        "Soon the {thing} was back on the ground. | {F} threw the {thing} down, and {H} caught it.",
    ),
    (
        ("What got stuck in the tree?", "The {thing} got stuck in the tree."),
        ("What did {F} bring?", "{F} brought a ladder."),
        ("Who climbed the ladder?", "{F} climbed the ladder."),
    ),
)
NOISE = Plot(
    (
        "In the middle of the night {H} woke up. | {H} was lying in bed and could not sleep.",
        "There was a strange noise {hiding}. | {He} heard something move {hiding}.",
        "{H} was afraid and pulled the blanket over {his} head. | {His} heart beat fast. What could it be?",
        (
            "But {he} wanted to know, so {he} took a lamp and went to look. | "
            "Then {he} took a deep breath, lit a lamp and went to see."
        ),
        ("It was only a {animal} that was looking for {food}! | There sat a small {animal}, and it was eating {food}."),
        "{H} laughed and was not afraid any more. | {H} laughed at {himself} and went back to bed.",
    ),
    (
        ("Why was {H} afraid?", "{H} heard a strange noise."),
        ("What made the noise?", "A {animal} made the noise."),
        ("What did {H} take along?", "{H} took a lamp."),
    ),
)
BROKEN = Plot(
    (
        "{H} was running through the house. | {H} played inside, even though {kin} had said no.",
        (
            "{He} bumped into the table, and {a_thing} fell down and broke. | "
            "With a loud crash {a_thing} fell on the floor and broke."
        ),
        "{H} felt bad and hid the pieces {hiding}. | {He} was so afraid that {he} hid the pieces {hiding}.",
        (
            "But {he} could not stop thinking about it. In the end {he} told {kin} the truth. | "
            'Then {F} said, "You should tell the truth." So {H} went to {kin} and told everything.'
        ),
        "{Kin} was not angry at all. | {Kin} smiled and put an arm around {him}.",
        ("Together they fixed the {thing} with glue. | They took some glue and fixed the {thing}, piece by piece."),
    ),
    (
        ("What broke?", "The {thing} broke."),
        ("Where did {H} hide the pieces?", "{H} hid them {hiding}."),
        ("How did they fix the {thing}?", "They fixed it with glue."),
    ),
)
SEED = Plot(
    (
        "{Kin} gave {H} a tiny seed. | {H} found a tiny seed near {place}.",
        (
            "{He} put it into the ground and gave it water every day. | "
            "{He} dug a small hole, put the seed in and covered it."
        ),
        "For many days nothing happened. | Day after day {H} looked, but there was only brown earth.",
        '"It will never grow," said {H}. "Wait a little," said {F}. | {F} told {him} to be patient.',
        (
            "Then, after {number} weeks, a green leaf came up. | "
            "One morning, after {number} weeks, there was a small green leaf."
        ),
        (
            "It grew and grew, and in the end it was {a_plant}. | "
            "It became {a_plant}, and everyone in the village came to see it."
        ),
    ),
    (
        ("What grew from the seed?", "It became {a_plant}."),
        ("How long did {H} wait?", "{H} waited {number} weeks."),
        ("Who told {H} to wait?", "{F} told {H} to wait."),
    ),
)
BIRTHDAY = Plot(
    (
        (
            "It was {F}'s birthday, and {H} wanted to give {fhim} something special. | "
            "{F} had a birthday soon, and {H} wanted to find a good gift."
        ),
        "But {H} had no money at all. | {H} went to {place} to look, but everything cost too much.",
        "So {he} worked all day and made {gift}. | Then {he} had an idea. {He} would make {gift}!",
        "{He} hid the gift {hiding} until the evening. | To keep it a secret, {he} put it {hiding}.",
        "When {F} saw it, {fhis} eyes grew big. | {F} could not believe it and laughed with joy.",
        (
            '"This is the best gift of all, because you made it," said {F}. | '
            '"I will always keep this in my heart," said {F}.'
        ),
    ),
    (
        ("Whose birthday was it?", "It was {F}'s birthday."),
        ("What did {H} make?", "{H} made {gift}."),
        ("Where did {H} hide the gift?", "{H} hid it {hiding}."),
    ),
)
RACE = Plot(
    (
        ("There was a big race at {place}. | {H} and {F} wanted to see who could run faster, so they met at {place}."),
        "The winner would get {a_thing}. | {Kin} promised the winner {a_thing}.",
        "{H} ran as fast as the wind and was soon in front. | Everyone cheered, and {H} took the lead.",
        "Then {F} fell over a stone and hurt {fhis} knee. | But {F} tripped on a root and sat down in pain.",
        "{H} stopped, turned around and helped {F} to stand up. | {H} heard the cry and went back to help.",
        (
            "They walked over the line together and shared the {thing}. | "
            "In the end both crossed the line hand in hand, and both got the {thing}."
        ),
    ),
    (
        ("Where was the race?", "The race was at {place}."),
        ("Who fell?", "{F} fell."),
        ("What was the prize?", "The prize was {a_thing}."),
    ),
)
QUARREL = Plot(
    (
        "{H} and {F} saw {a_thing} lying {hiding}. | {H} and {F} found {a_thing} {hiding}.",
        '"It is mine!" said {H}. "No, it is mine!" said {F}. | Both of them wanted to have it.',
        ("They pulled and pulled until it fell into the mud. | They pulled so hard that both fell into the mud."),
        ("Now the {thing} was dirty, and nobody was happy. | {H} looked at {F}. {F} looked at {H}. Both felt silly."),
        ('"I am sorry," said {H}. "I am sorry too," said {F}. | First {H} said sorry, and then {F} said sorry too.'),
        "They washed the {thing} and took turns with it. | From that day they took turns with the {thing}.",
    ),
    (
        ("What did {H} and {F} find?", "They found {a_thing}."),
        ("Where did the {thing} fall?", "It fell into the mud."),
        ("How did they solve the problem?", "They took turns."),
    ),
)
LEARN = Plot(
    (
        "{H} wanted to learn to {skill}. | More than anything, {H} wished to {skill}.",
        "{He} tried it at {place}, but it did not work. | On the first try everything went wrong.",
        '"I will never be able to {skill}," said {H}. | {H} sat down and felt sad.',
        (
            '{F} said, "I could not do it at first. Let me show you." | '
            "But {F} knew how to {skill} and showed {him} how."
        ),
        "They practised every day for {number} weeks. | Every day they went to {place} and practised.",
        (
            "At last {H} could {skill}, and {he} was {glad}. | "
            "Then one day it worked, and {H} could {skill} all by {himself}."
        ),
    ),
    (
        ("What did {H} want to learn?", "{H} wanted to learn to {skill}."),
        ("Who helped {H}?", "{F} helped {H}."),
        ("Could {H} do it in the end?", "Yes, in the end {H} could {skill}."),
    ),
)

FIRST_PLOTS = (LOST, RAIN, HUNGRY, HURT, STUCK, NOISE, BROKEN, SEED, BIRTHDAY, RACE, QUARREL, LEARN)
