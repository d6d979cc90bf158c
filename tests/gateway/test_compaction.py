"""Conversations that are compacted by a model that thinks: a summary that is whole, or an error."""

from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from gateway_svc.openai.responses.items import InputCompaction
from tests.gateway.reciter import MODEL, TEMPLATE, serve_reciter
from tests.gateway.reciting_model import cue
from tests.patience import patient

ANSWERS: dict[str, list[str]] = {  # by the last word of the instructions
    cue("whole"): ["<think>\nHm, what is wanted?\n</think>", "\n\nAnn asked for tea."],
    cue("thinks"): ["<think>\nWhat may it be? I do not know."],
    cue("ponders"): ["<think>\n" + " ".join(map(str, range(1000, 1500)))],
    cue("blank"): ["<think>Nothing to say.</think>", "\n\n \n"],
    cue("nothing"): [""],
    cue("endless"): [" ".join(map(str, range(2000, 2500)))],
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    template = TEMPLATE.replace("(say or messages[-1].content)", "messages[-1].content.split()[-1]")
    with serve_reciter(tmp_path_factory.mktemp("compacting"), ANSWERS, template) as addresses:
        yield addresses[1]


def compacted(url: str, instructions: str) -> httpx2.Response:
    body = {"model": MODEL, "input": "Tea, please.", "instructions": instructions}
    return httpx2.post(f"{url}/v1/responses/compact", json=body, timeout=patient(60))


def test_the_summary_is_what_comes_behind_the_thoughts(url: str) -> None:
    answer = compacted(url, "whole")
    assert answer.status_code == 200
    [item] = answer.json()["output"]
    assert InputCompaction.model_validate(item).text == "Ann asked for tea."


def test_what_an_agent_did_since_the_users_only_turn_is_compacted_however_much_it_is(url: str) -> None:
    done: list[dict[str, Any]] = [{"role": "user", "content": "Tea, please."}]
    for number in range(40):
        call_id = f"call_{number}"
        done.append({"type": "function_call", "call_id": call_id, "name": "weather", "arguments": '{"city": "Rome"}'})
        done.append({"type": "function_call_output", "call_id": call_id, "output": "It rains. " * 10})
    body = {"model": MODEL, "input": done, "instructions": "whole"}
    answer = httpx2.post(f"{url}/v1/responses/compact", json=body, timeout=patient(60))
    assert answer.status_code == 200, answer.text
    assert InputCompaction.model_validate(answer.json()["output"][0]).text == "Ann asked for tea."


@pytest.mark.parametrize(
    ("instructions", "code", "words"),
    [
        ("thinks", "no_summary", "the model wrote no summary"),
        ("ponders", "no_summary", "the model wrote no summary"),
        ("blank", "no_summary", "the model wrote no summary"),
        ("nothing", "no_summary", "the model wrote no summary"),
        ("endless", "summary_too_long", "the summary was cut short"),
    ],
)
def test_without_a_whole_summary_the_answer_is_an_error(url: str, instructions: str, code: str, words: str) -> None:
    answer = compacted(url, instructions)
    assert answer.status_code == 500, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("server_error", None, code)
    assert words in error["message"] and "Go on with the conversation as it is" in error["message"]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with client as api, pytest.raises(openai.InternalServerError, match=words):
        api.responses.compact(model=MODEL, input="Tea, please.", instructions=instructions)
