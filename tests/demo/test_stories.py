import re
from itertools import islice
from random import Random

import pytest

from demo.chats import BOS, EOS, SPECIAL_TOKENS
from demo.facts import NUMBERS, minus, neighbour, plus
from demo.more_story_plots import PLOTS
from demo.scene import draw_cast, draw_scene
from demo.stories import documents, draw_story

NUM_DOCUMENTS = 1_500


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return list(islice(documents(11), NUM_DOCUMENTS))


def test_the_same_seed_gives_the_same_documents(texts: list[str]) -> None:
    assert list(islice(documents(11), NUM_DOCUMENTS)) == texts


def test_another_seed_gives_other_documents(texts: list[str]) -> None:
    # Short question documents may come twice by chance; whole stories do not.
    shared = set(texts) & set(islice(documents(12), NUM_DOCUMENTS))
    assert len(shared) < NUM_DOCUMENTS / 20
    assert all(len(text) < 600 for text in shared)


def test_documents_are_ascii_and_stand_between_their_markers(texts: list[str]) -> None:
    for text in texts:
        assert text.isascii()
        assert text.startswith(BOS) and text.endswith(EOS)
        assert text.count(BOS) == 1
        assert len(text) > len(BOS + EOS)


def test_no_template_field_is_left_open(texts: list[str]) -> None:
    for text in texts:
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "")
        assert not re.search(r"[{}<>|]|  | \.|\ba [aeiou]", text), text


def test_stories_differ_from_each_other_and_some_are_long(texts: list[str]) -> None:
    lengths = sorted(len(text.split()) for text in texts)
    assert lengths[-1] > 400
    assert len(set(texts)) > 0.9 * len(texts)


@pytest.mark.parametrize("index", range(len(PLOTS)))
def test_every_answer_about_a_plot_names_something_that_its_story_tells(index: int) -> None:
    rng = Random(index)
    scene = draw_scene(rng, draw_cast(rng))
    told = " ".join(step.format_map(scene.fields) for step in PLOTS[index].steps).lower()
    assert len(PLOTS[index].questions) >= 3
    for _, answer in PLOTS[index].questions:
        words = re.findall(r"[a-z']+", answer.format_map(scene.fields).lower())
        # At most a few words of grammar ("was", "it", "because") come from outside of the story.
        missing = [word for word in words if word not in told]
        assert len(missing) <= len(words) / 2, (answer, missing)


def test_a_plot_comes_once_in_a_story() -> None:
    story = draw_story(Random(3), len(PLOTS))
    assert len(story.questions) == sum(len(plot.questions) for plot in PLOTS)


def test_sums_and_differences_are_right() -> None:
    rng = Random(5)
    for _ in range(300):
        for draw in (plus, minus):
            _, answer = draw(rng)
            first, sign, second, result = _parse_sum(answer)
            assert result == (first + second if sign == "plus" else first - second)


def _parse_sum(answer: str) -> tuple[int, str, int, int]:
    first, sign, second, _, result = answer.lower().rstrip(".").split()
    numbers = [NUMBERS.index(word) if word.isalpha() else int(word) for word in (first, second, result)]
    return numbers[0], sign, numbers[1], numbers[2]


def test_sunday_is_followed_by_monday() -> None:
    rng = Random(6)
    answers = dict(neighbour(rng) for _ in range(2_000))
    assert answers["Which day comes after Sunday?"] == "After Sunday comes Monday."
    assert answers["Which day comes before Monday?"] == "Before Monday comes Sunday."
