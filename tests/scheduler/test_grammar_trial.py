"""Grammars are compiled in a process with limits first: whatever it does with one, the others go on."""

import asyncio
import errno
import json
import os
import subprocess
import threading
from collections.abc import Callable

import pytest

from quire.errors import FailedPreconditionError, UnavailableError
from scheduler_svc.text import grammar_trial
from scheduler_svc.text.grammar_trial import GrammarRefusedError, GrammarTrial
from tests.services import DEMO_MODEL

MANY_ITEMS = {
    "type": "array",
    "minItems": 30_000,
    "items": {"type": "null"},
    "x-guidance": {"whitespace_flexible": False},
}
GOOD = json.dumps({"grammars": [{"json_schema": {"type": "object"}}]})


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def chain(length: int) -> str:
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(length)) + f'\nr{length}: "a"\n'


@pytest.fixture
def trial() -> GrammarTrial:
    return GrammarTrial((DEMO_MODEL / "tokenizer.json").read_bytes(), 2048, [0])


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (lark("start: nothing"), "unknown name"),
        (lark("start: /(a/"), "unclosed group"),
        (json.dumps({"grammars": [{"json_schema": {"not": {}}}]}), "Unimplemented keys"),
        (json.dumps({"grammars": [{"json_schema": {"$ref": "https://example.com/a"}}]}), "not present in a registry"),
        ("[", "expecting rule"),
        (lark("start: /(a{1000}){1000}/"), "takes more than 0.5 s"),
        (lark(chain(4000)), "nests too deep"),
        (lark("start: start"), "^no text meets it: [a-z ,]*$"),
        (json.dumps({"grammars": [{"json_schema": {"$ref": "#"}}]}), "^no text meets it: [a-z ,]*$"),
        (json.dumps({"grammars": [{"json_schema": MANY_ITEMS}]}), "^parser error: Too many items [^<]*$"),
    ],
    ids=["name", "expression", "keyword", "reference", "no grammar", "long", "deep", "rule", "root", "many items"],
)
async def test_a_grammar_that_cannot_be_used_is_refused_and_the_next_is_not(
    trial: GrammarTrial, grammar: str, reason: str
) -> None:
    with pytest.raises(GrammarRefusedError, match=reason):
        await trial.check(grammar)
    await trial.check(GOOD)


async def test_a_grammar_that_passed_is_not_compiled_again(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = note_trials(trial, monkeypatch)
    for grammar in (GOOD, lark('start: "a"'), GOOD, GOOD):
        await trial.check(grammar)
    assert tried == [GOOD, lark('start: "a"')]


async def test_a_grammar_that_many_requests_bring_at_once_is_compiled_once_whether_or_not_it_passes(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = note_trials(trial, monkeypatch)
    costly = lark("start: /(a{1000}){1000}/")
    found = await asyncio.gather(*map(trial.check, [costly, GOOD] * 3), return_exceptions=True)
    found += await asyncio.gather(trial.check(costly), return_exceptions=True)
    assert tried == [costly, GOOD]
    assert found[1::2] == [None] * 3
    for refusal in found[::2]:
        assert isinstance(refusal, GrammarRefusedError) and "takes more than 0.5 s" in str(refusal)


async def test_a_grammar_that_was_refused_is_tried_again_after_a_while(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "_REFUSED_S", 0.0)
    tried = note_trials(trial, monkeypatch)
    for _ in range(2):
        with pytest.raises(GrammarRefusedError):
            await trial.check(lark("start: nothing"))
    assert tried == [lark("start: nothing")] * 2


async def test_no_more_than_so_many_grammars_are_remembered(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "_MOST_REMEMBERED", 2)
    for name in ("a", "b", "c"):
        await trial.check(lark(f'start: "{name}"'))
        with pytest.raises(GrammarRefusedError):
            await trial.check(lark(f"start: {name}"))
    assert len(trial._passed) == len(trial._refused) == 2


def note_trials(trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grammars that the trial compiles from now on, in their order."""
    tried: list[str] = []
    try_one: Callable[[str], None] = trial._try

    def try_and_note(grammar: str) -> None:
        tried.append(grammar)
        try_one(grammar)

    monkeypatch.setattr(trial, "_try", try_and_note)
    return tried


@pytest.fixture
def tried(trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch) -> "list[str]":
    """Grammars in the order in which they were tried, none of which is compiled."""
    found: list[str] = []
    monkeypatch.setattr(trial, "_try", found.append)
    return found


async def test_who_has_many_grammars_keeps_nobody_else_waiting(trial: GrammarTrial, tried: list[str]) -> None:
    """Regression: they were tried in the order in which they came, each for up to half a second."""
    are_all_there = threading.Event()
    first = asyncio.create_task(trial._thread.run("first", are_all_there.wait))
    greedy = [asyncio.create_task(trial.check(f"greedy {number}", "greedy")) for number in range(20)]
    others = [asyncio.create_task(trial.check(f"other {number}", f"other {number}")) for number in range(2)]
    await asyncio.sleep(0)  # each has begun
    are_all_there.set()
    await asyncio.gather(first, *greedy, *others)
    assert tried[:4] == ["greedy 0", "other 0", "other 1", "greedy 1"]
    assert tried[4:] == [f"greedy {number}" for number in range(2, 20)]


async def test_a_grammar_that_an_owner_sends_many_times_at_once_is_tried_once(
    trial: GrammarTrial, tried: list[str]
) -> None:
    await asyncio.gather(*(trial.check(GOOD, "one") for _ in range(20)))
    assert tried == [GOOD]


async def test_a_tokenizer_that_grammars_do_not_work_with_is_named() -> None:
    word_level = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}
    trial = GrammarTrial(json.dumps(word_level).encode(), 2, [0])
    with pytest.raises(FailedPreconditionError, match="do not work with the model's tokenizer"):
        await trial.check(GOOD)


async def test_a_grammar_waits_while_the_system_starts_no_process(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients try again then: neither their grammar nor the scheduler is at fault."""
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", _no_process)
        with pytest.raises(UnavailableError, match="cannot start a process for this now: Too many open files"):
            await trial.check(GOOD)
    await trial.check(GOOD)


async def test_a_grammar_is_tried_with_the_limit_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "STEP_MAX_ITEMS", 5)
    strict = GrammarTrial((DEMO_MODEL / "tokenizer.json").read_bytes(), 2048, [0])
    with pytest.raises(GrammarRefusedError, match=r"Too many items \(limit 5;"):
        await strict.check(GOOD)


def _no_process(*_: object, **__: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
