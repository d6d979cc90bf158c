"""Plots of stories, the second half, and the table of all of them."""

from demo.story_plots import FIRST_PLOTS, Plot

BRIDGE = Plot(
    (
        "{H} and {F} wanted to go to {place}. | {H} was on the way to {place} with {F}.",
        "But the bridge over the river was broken. | When they came to the river, the bridge was gone.",
        '"The water is too deep for us," said {H}. | The water was deep and fast, and they could not cross.',
        (
            "So they looked for wood and carried it to the river. | "
            "They did not give up. They collected wood all morning."
        ),
        (
            "A {animal} came along and helped them to build a new bridge. | "
            "They worked hard, and even a {animal} came to help with the bridge."
        ),
        (
            "In the evening the bridge was done, and everyone could cross. | "
            "When it was done, they walked over it with big smiles."
        ),
    ),
    (
        ("Where did they want to go?", "They wanted to go to {place}."),
        ("What was broken?", "The bridge was broken."),
        ("Who came to help?", "A {animal} came to help."),
    ),
)
COINS = Plot(
    (
        "{H} had {number} coins and went to the market. | {Kin} gave {H} {number} coins for the market.",
        "{He} wanted to buy {a_thing}. | For a long time {he} had wished for {a_thing}.",
        "On the way {he} met {F}, who looked very sad. | But in front of the shop {F} sat and cried.",
        '"I have lost my money, and I cannot buy {food}," said {F}. | {F} had no money left to buy {food}.',
        "{H} bought the {food} for {F} instead. | So {H} used {his} coins and bought {food} for {F}.",
        (
            "The old seller saw this and gave {H} the {thing} for free. | "
            "The seller smiled at so much kindness and gave {him} the {thing} as a gift."
        ),
    ),
    (
        ("How many coins did {H} have?", "{H} had {number} coins."),
        ("What did {H} want to buy?", "{H} wanted to buy {a_thing}."),
        ("What did {H} buy for {F}?", "{H} bought {food}."),
    ),
)
SNOW = Plot(
    (
        ("It snowed all night, and in the morning everything was white. | Winter came, and snow lay over {place}."),
        ("{H} and {F} put on warm coats and built a snowman. | {H} called {F}, and together they made a big snowman."),
        (
            "They gave it {a_thing} and a nose made from a carrot. | "
            "For a nose they took a carrot, and they also gave it {a_thing}."
        ),
        (
            "But when the sun came out, the snowman began to melt. | "
            "The next days were warm, and the snowman grew smaller and smaller."
        ),
        ("{H} was sad when only the {thing} was left. | Soon there was only water, the carrot and the {thing}."),
        (
            '"Do not be sad," said {kin}. "Winter will come again." | '
            "{Kin} said that the snow would come back next year."
        ),
    ),
    (
        ("What did {H} and {F} build?", "They built a snowman."),
        ("What was the nose made from?", "The nose was made from a carrot."),
        ("Why did the snowman melt?", "It melted because the sun was warm."),
    ),
)
ASTRAY = Plot(
    (
        (
            "{H} followed {a_colour} butterfly deep into the forest. | "
            "{A_colour} butterfly flew by, and {H} ran after it into the forest."
        ),
        (
            "When {he} looked around, {he} did not know the way back. | "
            "Suddenly all the trees looked the same, and {he} was lost."
        ),
        "It became dark, and {H} was afraid. | {He} called for help, but nobody answered.",
        ("Then a {animal} came out and looked at {him}. | At that moment a friendly {animal} sat down next to {him}."),
        ('"Follow me," it said, and it showed {him} the way. | The {animal} walked in front, and {H} followed it.'),
        (
            "At the edge of the forest {kin} was waiting with {food}. | "
            "Soon {he} saw the lights of home, where {kin} had made {food}."
        ),
    ),
    (
        ("What did {H} follow into the forest?", "{H} followed {a_colour} butterfly."),
        ("Who showed {H} the way?", "A {animal} showed {H} the way."),
        ("Who was waiting for {H}?", "{Kin} was waiting."),
    ),
)
MAP = Plot(
    (
        "{H} found an old map inside {a_thing}. | In {a_thing} {H} found an old map.",
        "It showed the way to {place}. | There was a cross on it, close to {place}.",
        "{He} showed it to {F}, and they left at once. | {H} ran to {F}, and the two of them went to look.",
        (
            "They walked {number} miles and dug a deep hole. | "
            "After {number} miles they came to the right spot and began to dig."
        ),
        (
            "There they found a box, and inside was {treasure}. | "
            "Their hands hit a box. They opened it and saw {treasure}."
        ),
        "{H} and {F} decided to share what they had found. | They laughed all the way home.",
    ),
    (
        ("Where was the map?", "It was inside {a_thing}."),
        ("What was in the box?", "In the box was {treasure}."),
        ("How far did they walk?", "They walked {number} miles."),
    ),
)
SICK = Plot(
    (
        "{F} did not come out to play. | All day long {H} waited for {F}, but nobody came.",
        "{H} heard that {F} was sick and lay in bed. | Then {kin} told {H} that {F} was sick.",
        "So {he} cooked {food} and took it to {F}. | {H} packed {food} and {a_thing} and went to see {fhim}.",
        (
            "{He} sat down by the bed and told a story about a {animal}. | "
            "To cheer {fhim} up, {H} told a long story about a {animal}."
        ),
        "{F} laughed for the first time that day. | {F} felt a little better with every word.",
        (
            "After {number} days {F} was well, and they could play again. | "
            "{F} was well again after {number} days, and the first thing {fhe} did was to thank {H}."
        ),
    ),
    (
        ("Who was sick?", "{F} was sick."),
        ("What did {H} bring?", "{H} brought {food}."),
        ("What was the story about?", "It was about a {animal}."),
    ),
)
BOAT = Plot(
    (
        "{H} made a small boat and painted it {colour}. | With some wood and glue {H} built {a_colour} boat.",
        "{He} took it to the river near {place}. | Then {he} put it on the water close to {place}.",
        (
            "At first it sailed well, but then the wind took it away. | "
            "The wind was strong, and the boat went farther and farther."
        ),
        '"My boat!" cried {H}. "Come back!" | {H} ran along the water, but the boat was faster.',
        (
            "{F} was standing further down with a long stick and stopped the boat. | "
            "Luckily {F} was fishing there and caught the boat with a stick."
        ),
        ("They tied a string to the boat, so that it could not get lost again. | After that {H} always used a string."),
    ),
    (
        ("What colour was the boat?", "The boat was {colour}."),
        ("Who caught the boat?", "{F} caught the boat."),
        ("Why did the boat sail away?", "The wind took it away."),
    ),
)
BAKING = Plot(
    (
        "{H} wanted to bake a cake for {kin}. | {H} and {F} wanted to bake a cake.",
        ("{He} took flour, eggs and milk, and put it all in a bowl. | They mixed flour, eggs and milk in a big bowl."),
        "But the cake tasted very bad. | When it was done, they tasted it and made a face.",
        '"You forgot the sugar!" said {F}. | Then {F} saw the sugar on the table. It had been forgotten.',
        (
            "They laughed and started again, this time with sugar and {food}. | "
            "So they made a second cake with sugar and {food}."
        ),
        (
            "The new cake was soft and sweet, and {kin} asked for more. | "
            "{Kin} ate {number} pieces and said that it was the best cake ever."
        ),
    ),
    (
        ("What did {H} want to bake?", "{H} wanted to bake a cake."),
        ("What was forgotten?", "The sugar was forgotten."),
        ("What did they add to the second cake?", "They added sugar and {food}."),
    ),
)
MESS = Plot(
    (
        "The room of {H} was a big mess. | {H} never wanted to clean {his} room.",
        "There were toys and socks everywhere. | Old paper and toys covered the floor.",
        ("One day {he} could not find {his} {thing}. | When {he} wanted to show {F} the {thing}, it was not there."),
        '"How can you find anything here?" asked {F}. | {F} shook {fhis} head and said, "Let us clean up."',
        (
            "They cleaned for {number} hours, and there it was, {hiding}. | "
            "They put everything in its place, and after {number} hours they found it {hiding}."
        ),
        "Since then {H} cleans the room every week. | {H} said that a clean room saves a lot of time.",
    ),
    (
        ("What could {H} not find?", "{H} could not find {his} {thing}."),
        ("Where was it?", "It was {hiding}."),
        ("How long did they clean?", "They cleaned for {number} hours."),
    ),
)
THIEF = Plot(
    (
        ("Every night some {food} went missing from the kitchen. | In the kitchen the {food} became less every night."),
        '"Who takes our {food}?" asked {kin}. | {Kin} thought that {H} had eaten it, but {he} had not.',
        ("So {H} hid {hiding} and watched. | That night {H} did not go to sleep. {He} sat {hiding} and waited."),
        ("At midnight a thin {animal} came through the window. | Then the window opened, and a {animal} came in."),
        (
            "It had {number} hungry little ones at home. | "
            "{H} followed it and saw that it had {number} little ones to feed."
        ),
        (
            "From then on {H} put a bowl of {food} outside every evening. | "
            "{H} was not angry and gave it {food} every day."
        ),
    ),
    (
        ("What went missing?", "Some {food} went missing."),
        ("Who took the {food}?", "A {animal} took it."),
        ("How many little ones did it have?", "It had {number} little ones."),
    ),
)
CONCERT = Plot(
    (
        (
            "{H} liked to {skill}, and {F} liked to {other_skill}. | "
            "{F} could {other_skill} very well, and {H} could {skill}."
        ),
        (
            "One day a paper hung at {place}. It said that there would be a show. | "
            "There was going to be a show at {place}."
        ),
        (
            "{H} wanted to take part, but {he} was too shy to stand up alone. | "
            "{F} said yes at once, but {H} was afraid of so many people."
        ),
        ('"Then we will do it together," said {F}. | {F} took {his} hand and said that they would do it together.'),
        (
            "When the evening came, {H} looked only at {F} and forgot the crowd. | "
            "They stood up in front of everyone, and {H} was not afraid any more."
        ),
        (
            "The people clapped for a long time, and each of them got {a_thing}. | "
            "They won {a_thing}, and {kin} was very proud."
        ),
    ),
    (
        ("What did {H} like to do?", "{H} liked to {skill}."),
        ("What did {F} like to do?", "{F} liked to {other_skill}."),
        ("Where was the show?", "The show was at {place}."),
    ),
)
STAR = Plot(
    (
        "At night {H} looked up and saw a falling star. | A bright star fell from the sky above {place}.",
        "{He} closed {his} eyes and made a wish for {a_thing}. | {H} made a wish. {He} wished for {a_thing}.",
        ("The next morning there was no {thing}, only {F} at the door. | But in the morning nothing had changed."),
        ('"Come with me," said {F}. "I want to show you something." | {F} came and asked {him} to go for a walk.'),
        (
            "They went to a spot {hiding}, and there was a {animal} with her babies. | "
            "{F} showed {him} a secret: a {animal} and her babies lived {hiding}."
        ),
        '"This is better than {a_thing}," said {H}. | {H} forgot the wish, for this was much better.',
    ),
    (
        ("What did {H} wish for?", "{H} wished for {a_thing}."),
        ("What did {F} show {H}?", "{F} showed {H} a {animal} with her babies."),
        ("Where did the {animal} live?", "It lived {hiding}."),
    ),
)

PLOTS = (*FIRST_PLOTS, BRIDGE, COINS, SNOW, ASTRAY, MAP, SICK, BOAT, BAKING, MESS, THIEF, CONCERT, STAR)
