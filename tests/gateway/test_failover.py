"""Scheduler, worker and store are killed while answers stream over HTTP: their clients see a pause and nothing else."""

import signal
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack

import httpx2
import openai

import quire
from quire.params import ClientOptions
from tests.gateway.conftest import MODEL
from tests.patience import MOST_ATTEMPTS, patient
from tests.services import Service, free_address, start_gateway, start_scheduler, start_worker
from tests.valkey import ValkeyProcess

PROMPTS = ("Once upon a time", "One day a small puppy", "A kind goose lived near the beach.", "Tom")
NUM_TOKENS = 400
MORE = 20  # events of each stream between two deaths


class Site:
    """One of each process, on a store that stays."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.address = free_address()
        self.store = stack.enter_context(ValkeyProcess())
        self.begin_scheduler()
        self.begin_worker()
        gateway, self.url = start_gateway(self.address)
        stack.enter_context(gateway)
        self.scheduler.wait_for("worker ready")

    def begin_scheduler(self) -> None:
        service, _ = start_scheduler("--store", self.store.url, listen=self.address)
        self.scheduler = self._stack.enter_context(service)

    def begin_worker(self) -> None:
        options = ("--dtype", "float32", "--threads", "1", "--num-blocks", "300", "--model-name", MODEL)
        self.worker = self._stack.enter_context(start_worker(self.address, *options))

    def kill_scheduler(self) -> None:
        kill(self.scheduler)
        self.begin_scheduler()

    def kill_worker(self) -> None:
        kill(self.worker)
        self.begin_worker()

    def kill_store(self) -> None:
        self.store.kill()
        self.store.start()


def kill(service: Service) -> None:
    service.signal(signal.SIGKILL)
    service.wait()


class Reading:
    """Streams of several threads, and the number of events that each has had."""

    def __init__(self, url: str) -> None:
        self._api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=patient(120))
        self._changed = threading.Condition()
        self.num_events = [0] * len(PROMPTS)
        self._has_ended = False

    def read(self, number: int) -> str:
        text = ""
        for event in self._api.completions.create(
            model=MODEL,
            prompt=PROMPTS[number],
            seed=number,
            max_tokens=NUM_TOKENS,
            stream=True,
            extra_body={"ignore_eos": True},
        ):
            text += event.choices[0].text
            with self._changed:
                self.num_events[number] += 1
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        return text

    def wait_for_more(self) -> None:
        """Wait until each stream has had some more events, or one has ended."""
        with self._changed:
            wanted = [num + MORE for num in self.num_events]
            arrived = self._changed.wait_for(
                lambda: (
                    self._has_ended or all(num >= least for num, least in zip(self.num_events, wanted, strict=True))
                ),
                patient(60),
            )
            assert arrived, (self.num_events, wanted)


def test_answers_go_on_whatever_dies() -> None:
    with ExitStack() as stack:
        site = Site(stack)
        with quire.Client(site.address) as sdk:
            expected = [
                sdk.generate(prompt, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True).text
                for number, prompt in enumerate(PROMPTS)
            ]
        attempts = (go_on_whatever_dies(site, expected) for _ in range(MOST_ATTEMPTS))
        assert any(attempts), "deaths that came too late mean nothing"


def go_on_whatever_dies(site: Site, expected: list[str]) -> bool:
    """Kill one after the other while answers stream, which come to what is expected. False: one had ended before."""
    reading = Reading(site.url)
    deaths: tuple[Callable[[], None], ...] = (site.kill_scheduler, site.kill_worker, site.kill_store)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        readers = [pool.submit(reading.read, number) for number in range(len(PROMPTS))]
        for die in deaths:
            reading.wait_for_more()
            die()
        is_in_time = not any(reader.done() for reader in readers)
        assert [reader.result() for reader in readers] == expected
    return is_in_time


def test_a_new_gateway_waits_for_a_scheduler_that_comes_later() -> None:
    calls: list[tuple[str, dict[str, object]]] = [
        ("/v1/completions", {"prompt": "Once", "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "Hello", "background": True, "max_output_tokens": 16}),
        ("/tokenize", {"prompt": "Once upon"}),
    ]
    address, at_first_s = free_address(), ClientOptions().connect_timeout_s
    gateway, url = start_gateway(address)
    with gateway, httpx2.Client(base_url=url, timeout=patient(60)) as http, ThreadPoolExecutor() as threads:
        answers = [threads.submit(http.post, path, json=body) for path, body in calls]
        assert not wait(answers, timeout=at_first_s + 1, return_when=FIRST_COMPLETED).done
        scheduler, _ = start_scheduler(listen=address)
        with scheduler:
            for answer in answers:  # of the scheduler, which does not wait as long for a worker
                assert "no worker has registered yet" in answer.result().text
            with start_worker(address, "--dtype", "float32", "--threads", "1"):
                scheduler.wait_for("worker ready")
                assert [http.post(path, json=body).status_code for path, body in calls] == [200] * len(calls)
