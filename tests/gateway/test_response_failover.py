"""Scheduler, worker, store and a gateway are killed while responses are made, which lose and repeat no character."""

import threading
from contextlib import ExitStack
from typing import Any

import httpx2

import quire
from tests.gateway.conftest import MODEL
from tests.gateway.test_failover import Site, kill
from tests.gateway.test_response_streams import events_of, resumed
from tests.gateway.test_streams import eventually
from tests.patience import MOST_ATTEMPTS, patient
from tests.services import start_gateway

STREAMED: dict[str, Any] = {"input": "Who are you?", "seed": 1, "max_output_tokens": 500}
IN_BACKGROUND: dict[str, Any] = {"input": "Tell me a story.", "seed": 2, "max_output_tokens": 1200}
MORE = 20  # events between two deaths
FIELDS: dict[str, Any] = {"model": MODEL, "ignore_eos": True}


class Reading:
    """A stream that is read in a thread until it breaks."""

    def __init__(self, url: str) -> None:
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._has_ended = False
        self._url = url
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def wait_for_more(self) -> None:
        """Wait until some more events have come, or it has ended."""
        with self._changed:
            wanted = len(self._lines) + 4 * MORE
            assert self._changed.wait_for(lambda: self._has_ended or len(self._lines) >= wanted, patient(60))

    def events(self) -> list[dict[str, Any]]:
        """The whole events that came before it broke."""
        self._thread.join()
        num_whole = len(self._lines) // 4 * 4  # event, id, data, and an empty line
        return events_of([*self._lines[:num_whole], "data: [DONE]"])

    def _read(self) -> None:
        body = FIELDS | STREAMED | {"stream": True}
        try:
            with httpx2.stream("POST", f"{self._url}/v1/responses", json=body, timeout=patient(120)) as answer:
                for line in answer.iter_lines():
                    with self._changed:
                        self._lines.append(line)
                        self._changed.notify_all()
        except httpx2.RemoteProtocolError:
            pass  # the gateway died
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()


def expected_text(sdk: quire.Client, fields: dict[str, Any]) -> str:
    messages = [{"role": "user", "content": fields["input"]}]
    return sdk.chat(messages, seed=fields["seed"], max_tokens=fields["max_output_tokens"], ignore_eos=True).text


def broken_off(site: Site, stack: ExitStack) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """Kill one after the other while a response streams, at last its gateway, which has another one in background.

    Returns that one, and the events that came. None: the stream had ended before.
    """
    doomed, url = start_gateway(site.address)
    stack.enter_context(doomed)
    begun: dict[str, Any] = httpx2.post(
        f"{url}/v1/responses", json=FIELDS | IN_BACKGROUND | {"background": True}, timeout=patient(60)
    ).json()
    reading = Reading(url)
    for die in (site.kill_scheduler, site.kill_worker, site.kill_store):
        reading.wait_for_more()
        die()
    reading.wait_for_more()
    kill(doomed)
    events = reading.events()
    return None if events[-1]["type"].endswith("completed") else (begun, events)


def test_responses_go_on_whatever_dies() -> None:
    with ExitStack() as stack:
        site = Site(stack)
        with quire.Client(site.address) as sdk:
            expected = [expected_text(sdk, each) for each in (STREAMED, IN_BACKGROUND)]
        http = stack.enter_context(httpx2.Client(base_url=site.url, timeout=patient(60)))
        short = FIELDS | {"input": "x", "max_output_tokens": 9}
        answered, gone = (http.post("/v1/responses", json=short).json() for _ in range(2))
        assert http.delete(f"/v1/responses/{gone['id']}").json()["deleted"]
        begun, first = next(filter(None, (broken_off(site, stack) for _ in range(MOST_ATTEMPTS))))

        def background() -> dict[str, Any]:
            found: dict[str, Any] = http.get(f"/v1/responses/{begun['id']}").json()
            return found

        rest = resumed(http, first[0]["response"]["id"], starting_after=first[-1]["sequence_number"])
        events = first + rest
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        text = "".join(event["delta"] for event in events if event["type"].endswith("delta"))
        assert text == expected[0] == events[-1]["response"]["output"][0]["content"][0]["text"]
        assert begun["status"] == "queued"
        eventually(lambda: background()["status"] not in ("queued", "in_progress"), 60)
        ended = background()
        assert ended["output"][0]["content"][0]["text"] == expected[1]
        of_background = resumed(http, begun["id"])
        assert of_background[-1]["response"] == ended
        assert "".join(event.get("delta", "") for event in of_background) == expected[1]
        assert http.get(f"/v1/responses/{answered['id']}").json() == answered
        assert http.get(f"/v1/responses/{gone['id']}").status_code == 404
        assert http.post("/v1/responses", json=short | {"previous_response_id": answered["id"]}).status_code == 200
