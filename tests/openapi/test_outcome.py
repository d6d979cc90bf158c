"""Outcomes of schemathesis, from events as it writes them. Starts nothing."""

import json
from typing import Any

from tests.openapi.outcome import Outcome


def scenario(phase: str, status: str, answer: dict[str, Any] | None) -> str:
    recorder = {
        "label": "POST /x",
        "cases": {"a": {"value": {"method": "GET", "path": "/x"}}},
        "checks": {"a": [{"name": "not_a_server_error", "status": status}]},
        "interactions": {"a": {"response": answer}},
    }
    return json.dumps({"ScenarioFinished": {"phase": phase, "recorder": recorder}})


def answer(status: int, kind: str = "application/json") -> dict[str, Any]:
    return {"status_code": status, "headers": {"content-type": [kind]}}


def test_answers_are_counted_by_operation_and_status() -> None:
    outcome = Outcome()
    outcome.add([scenario("fuzzing", "success", answer(200)), scenario("coverage", "success", answer(400))])
    outcome.add([scenario("stateful", "success", answer(200, "text/event-stream; charset=utf-8"))])
    assert outcome.record()["operations"] == {
        "GET /x": {"cases": 1, "answers": {"200": 1}},
        "POST /x": {"cases": 2, "answers": {"200": 1, "400": 1}},
    }
    assert (outcome.num_cases, outcome.num_streams, outcome.failures) == (3, 1, [])


def test_failed_checks_missing_answers_and_errors_are_failures() -> None:
    outcome = Outcome()
    outcome.add([scenario("fuzzing", "failure", answer(500)), scenario("fuzzing", "success", None)])
    outcome.add([json.dumps({"NonFatalError": {"label": "POST /x"}})])
    assert len(outcome.failures) == 3


def test_an_operation_that_never_succeeds_is_a_failure() -> None:
    outcome = Outcome()
    outcome.add([scenario("fuzzing", "success", answer(400)), scenario("stateful", "success", answer(201))])
    outcome.require_success({"/x": ["get"]})
    assert not outcome.failures
    outcome.require_success({"/x": ["post"], "/y": ["put"]})
    assert outcome.failures == ["POST /x: none of 1 requests succeeded", "PUT /y: none of 0 requests succeeded"]


def test_outcomes_add_up() -> None:
    one, other = Outcome(), Outcome()
    one.add([scenario("fuzzing", "success", answer(200))])
    other.add([scenario("fuzzing", "failure", answer(500)), scenario("fuzzing", "success", answer(200))])
    one.add_all(other)
    assert one.answers == {"POST /x": {"200": 2, "500": 1}}
    assert (one.num_cases, one.phases["fuzzing"], len(one.failures)) == (3, 3, 1)
