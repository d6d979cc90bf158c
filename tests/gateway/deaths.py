"""Clients of OpenAI's package under load while everything behind their URL is killed in turn, a gateway included.

    python -m tests.gateway.deaths [--kills 300] [--record]

A scheduler, two workers, a store, and two gateways on one port; one of them is killed every second or two and started
again. The clients keep the package's defaults, and retry as it does by itself; a response whose stream breaks is
resumed behind its last event, one in the background is asked for again. Each text must be that of a calm run. Ends with
status 1 if there is a fault.
"""

import argparse
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from benchmarks.report import RESULTS, write_result
from tests.gateway.conftest import MODEL
from tests.gateway.test_failover import kill
from tests.services import Service, free_address, start_gateway, start_scheduler, start_worker
from tests.valkey import ValkeyProcess

NUM_CLIENTS = 8
NUM_JOBS = 40  # of different texts
PAUSE_S = (0.8, 2.0)  # between two deaths
_MOST_RESUMED = 20  # times, of one stream


class Site:
    """Processes of a deployment, each of which can be killed and is started again at its address."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.address, listen = free_address(), free_address()
        self.url = f"http://{listen}"
        self.store = stack.enter_context(ValkeyProcess())
        gateway = ("--listen", listen, "--shares-port")
        begin: dict[str, Callable[[], Service]] = {
            "scheduler": lambda: start_scheduler("--store", self.store.url, listen=self.address)[0],
            "worker 1": lambda: self._worker("first"),
            "worker 2": lambda: self._worker("second"),
            "gateway 1": lambda: start_gateway(self.address, *gateway)[0],
            "gateway 2": lambda: start_gateway(self.address, *gateway)[0],
        }
        self._begin = begin
        self._services = {name: stack.enter_context(start()) for name, start in begin.items()}
        self._services["scheduler"].wait_for("worker ready", 2)
        self.kinds = (*begin, "store")

    def kill(self, kind: str) -> None:
        """Kill one process, and start it again."""
        if kind == "store":
            self.store.kill()
            self.store.start()
        else:
            kill(self._services[kind])
            self._services[kind] = self._stack.enter_context(self._begin[kind]())

    def _worker(self, name: str) -> Service:
        options = ("--worker-id", name, "--dtype", "float32", "--threads", "1", "--num-blocks", "300")
        return start_worker(self.address, *options, "--model-name", MODEL)


@dataclass(frozen=True, slots=True)
class Job:
    """A request of one kind, whose text its seed decides."""

    kind: str
    seed: int

    def text(self, api: openai.OpenAI) -> str:
        """Text of its answer. Raises what the package raises when it gives up."""
        ask: dict[str, Callable[[openai.OpenAI], str]] = {
            "completion": self._completion,
            "chat": self._chat,
            "background response": self._background,
            "streamed response": self._streamed,
        }
        return ask[self.kind](api)

    @property
    def _more(self) -> dict[str, Any]:
        return {"seed": self.seed, "ignore_eos": True}

    def _completion(self, api: openai.OpenAI) -> str:
        done = api.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=60, extra_body=self._more)
        return done.choices[0].text

    def _chat(self, api: openai.OpenAI) -> str:
        messages: Any = [{"role": "user", "content": "Who are you?"}]
        done = api.chat.completions.create(model=MODEL, messages=messages, max_tokens=60, extra_body=self._more)
        return done.choices[0].message.content or ""

    def _background(self, api: openai.OpenAI) -> str:
        begun = api.responses.create(
            model=MODEL, input="Tell me a story.", background=True, max_output_tokens=100, extra_body=self._more
        )
        while begun.status in ("queued", "in_progress"):
            time.sleep(0.1)
            begun = api.responses.retrieve(begun.id)
        return begun.output_text

    def _streamed(self, api: openai.OpenAI) -> str:
        text, response_id, last = "", "", -1
        for attempt in range(_MOST_RESUMED):
            try:
                if response_id:
                    events: Any = api.responses.retrieve(response_id, stream=True, starting_after=last)
                else:
                    text = ""
                    events = api.responses.create(
                        model=MODEL,
                        input="Tell me of a dog.",
                        stream=True,
                        max_output_tokens=100,
                        extra_body=self._more,
                    )
                for event in self._in_order(events, last):
                    last = event.sequence_number
                    if event.type == "response.created":
                        response_id = event.response.id
                    if event.type == "response.output_text.delta":
                        text += event.delta
                    if event.type == "response.incomplete":  # its bound is reached
                        return text
            except (openai.APIConnectionError, openai.APIError, OSError):
                if attempt == _MOST_RESUMED - 1:
                    raise
            except Exception as error:  # the HTTP library's own, in the middle of a stream
                if "Protocol" not in type(error).__name__ and "Read" not in type(error).__name__:
                    raise
        raise RuntimeError("the stream did not end")

    @staticmethod
    def _in_order(events: Any, last: int) -> Iterator[Any]:
        for event in events:
            assert event.sequence_number == last + 1, f"event {event.sequence_number} follows {last}"
            last = event.sequence_number
            yield event


@dataclass(slots=True)
class Load:
    """Clients that ask again and again until they are told to stop."""

    url: str
    expected: dict[Job, str]
    stopping: threading.Event = field(default_factory=threading.Event)
    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def run(self, number: int) -> None:
        """Ask for one job after another."""
        generator = random.Random(number)
        jobs = list(self.expected)
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none") as api:
            while not self.stopping.is_set():
                job = generator.choice(jobs)
                try:
                    text = job.text(api)
                except Exception as error:
                    self.faults.append(f"{job}: {type(error).__name__}: {error!s:.300}")
                    continue
                self.answers[job.kind] += 1
                if text != self.expected[job]:
                    self.faults.append(f"{job}: {self.expected[job]!r} became {text!r}")


def main() -> None:
    """Reads the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="write the result")
    parser.add_argument("--output", type=Path, default=RESULTS / "gateway_deaths.json", help="where")
    options = parser.parse_args()
    generator = random.Random(options.seed)
    kinds = ("completion", "chat", "background response", "streamed response")
    jobs = [Job(kinds[number % len(kinds)], number) for number in range(NUM_JOBS)]
    kills: Counter[str] = Counter()
    with ExitStack() as stack, ThreadPoolExecutor(NUM_CLIENTS) as clients:
        site = Site(stack)
        with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none") as api:
            load = Load(site.url, {job: job.text(api) for job in jobs})
        running = [clients.submit(load.run, number) for number in range(NUM_CLIENTS)]
        for number in range(options.kills):
            time.sleep(generator.uniform(*PAUSE_S))
            kind = site.kinds[number % len(site.kinds)]
            site.kill(kind)
            kills[kind.split()[0]] += 1
        load.stopping.set()
        for each in running:
            each.result()
    figures = {
        "seed": options.seed,
        "kills": dict(kills),
        "clients": NUM_CLIENTS,
        "answers": dict(sorted(load.answers.items())),
        "num_faults": len(load.faults),
    }
    print(figures, *load.faults[:20], sep="\n", flush=True)  # noqa: T201
    if options.record:
        write_result(options.output, "gateway_deaths", figures)
    sys.exit(1 if load.faults else 0)


if __name__ == "__main__":
    main()
