"""Verdict on the requests of an open loop: refused before they were accepted, whole, or lost."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import quire
from tests.chaos.fault_table import Result, table
from tests.chaos.overload_faults import OUTPUT_TOKENS, SCENARIOS, Attempt, attempt_one, count_lost
from tests.chaos.scenario import Figures, Target
from tests.chaos.stage import Scenario

UNAVAILABLE = quire.UnavailableError("the scheduler is gone")


class ToldStream:
    """Stream of a request: accepted or refused, then chunks of one token, then an end or an error."""

    def __init__(self, num_tokens: int, error: quire.QuireError | None, *, is_accepted: bool) -> None:
        self._num_tokens, self._error, self._is_accepted = num_tokens, error, is_accepted

    async def accepted(self) -> None:
        if not self._is_accepted and self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[quire.Chunk]:
        await self.accepted()
        for position in range(self._num_tokens):
            yield quire.Chunk(position=position, num_tokens=1, text="a", token_ids=(7,))
        if self._error is not None:
            raise self._error


class ToldClient:
    """Client whose one stream is told beforehand."""

    def __init__(self, num_tokens: int, error: quire.QuireError | None = None, *, is_accepted: bool = True) -> None:
        self._stream = ToldStream(num_tokens, error, is_accepted=is_accepted)

    @asynccontextmanager
    async def stream(self, *_: object, **__: object) -> AsyncIterator[ToldStream]:
        yield self._stream


async def attempted(client: Any) -> Attempt:
    attempt = Attempt(0.0)
    await attempt_one(client, attempt)
    return attempt


@pytest.mark.parametrize("num_tokens", [0, 1, OUTPUT_TOKENS - 1])
@pytest.mark.parametrize("error", [UNAVAILABLE, quire.OverloadedError("full"), quire.RequestFailedError("odd")])
async def test_a_request_that_fails_after_it_was_accepted_is_lost(num_tokens: int, error: quire.QuireError) -> None:
    attempt = await attempted(ToldClient(num_tokens, error))
    assert attempt.refused_s is None and attempt.finished_s is None
    assert count_lost([attempt]) == 1


@pytest.mark.parametrize("num_tokens", [0, 1, OUTPUT_TOKENS - 1, OUTPUT_TOKENS + 1])
async def test_a_request_that_ends_with_other_than_its_tokens_is_lost(num_tokens: int) -> None:
    attempt = await attempted(ToldClient(num_tokens))
    assert attempt.finished_s is None
    assert count_lost([attempt]) == 1


async def test_a_whole_request_and_a_refused_one_are_not_lost() -> None:
    whole = await attempted(ToldClient(OUTPUT_TOKENS))
    refused = await attempted(ToldClient(0, UNAVAILABLE, is_accepted=False))
    assert whole.finished_s is not None and refused.refused_s is not None
    assert count_lost([whole, refused]) == 0


def test_a_count_that_was_not_measured_is_shown_as_a_dash_and_meets_no_target() -> None:
    async def play(_: object) -> Figures:
        return Figures()

    targets = (Target(figure="changed", at_most=0),)
    scenario = Scenario(fault="F", title="t", injected="i", promise="P1", play=play, targets=targets)
    result = Result(scenario, Figures(sent=3, accepted=2, lost=0), "", 1.0)
    assert set(targets) <= set(result.missed) and not result.is_met
    cells = table([result.as_json()]).splitlines()[-1].split(" | ")
    assert cells[4:11] == ["3", "2", "0", "–", "–", "–", "–"]


def test_overload_is_held_only_to_what_it_measures() -> None:
    overload = next(each for each in SCENARIOS if each.fault == "F28")
    assert not {target.figure for target in overload.targets} & {"duplicated", "missing", "changed"}
    assert {"lost", "leaked_blocks"} <= {target.figure for target in overload.targets}
