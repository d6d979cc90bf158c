"""Data of the tasks, drawn from the grammar of the demo model's training text with a seed that training does not use.

Knows no harness: its tasks are in `tasks/`.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from demo.facts import draw_fact
from demo.stories import draw_story

_NUM_CHOICES = 4
_NUM_GIVEN = 4  # sentences of a story that another has to follow


def write_data(folder: Path, num_items: int, seed: int) -> None:
    """Write a file of items for each task."""
    rng = Random(f"evaluation {seed}")
    stories = [draw_story(rng, 2).text for _ in range(num_items)]
    facts = [draw_fact(rng) for _ in range(num_items)]
    _write(folder / "choices.jsonl", (_choice(rng, each, [fact[1] for fact in facts]) for each in facts))
    _write(folder / "stories.jsonl", ({"text": each} for each in stories))
    _write(folder / "continuations.jsonl", map(_continuation, stories))
    _write(folder / "answers.jsonl", ({"question": question, "answer": answer} for question, answer in facts))


def _choice(rng: Random, fact: tuple[str, str], answers: list[str]) -> dict[str, Any]:
    question, answer = fact
    choices = [answer, *rng.sample(sorted({*answers} - {answer}), _NUM_CHOICES - 1)]
    rng.shuffle(choices)
    return {"question": question, "choices": choices, "answer": choices.index(answer)}


def _continuation(story: str) -> dict[str, Any]:
    sentences = story.split(". ")
    context = ". ".join(sentences[:_NUM_GIVEN]) + "."
    return {"context": context, "next": " " + sentences[_NUM_GIVEN].rstrip(".")}


def _write(file: Path, items: Iterable[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(each) + "\n" for each in items))
