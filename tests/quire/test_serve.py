"""`quire serve` as a user runs it: real services on the demo model, killed one after the other."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import openai
import pytest

import quire
from quire.time_slice import slice_ns
from tests.patience import patient
from tests.quire.serve_lines import READY_S, Serve
from tests.quire.serve_processes import child_commands, runs
from tests.services import DEMO_MODEL

SHORT_SLICE_NS = 100_000


def pids_of(data_dir: Path, what: str) -> list[int]:
    """Processes of this deployment, found as their files are: by their command lines."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if what in command and str(data_dir) in command:
                found.append(int(entry.name))
    return found


def wait_until_ended(pid: int) -> None:
    until_s = time.monotonic() + patient(30)
    while runs(pid):
        assert time.monotonic() < until_s, f"process {pid} goes on"
        time.sleep(0.02)


def children_of(pid: int) -> dict[str, int]:
    """Modules that run as children of a process."""
    children: dict[str, int] = {}
    for child, words in child_commands(pid).items():
        name = words[words.index("-m") + 1] if "-m" in words else Path(words[0].split(" ")[0]).name
        children[name] = child
    return children


def slices_of(pid: int) -> set[int | None]:
    """Slices of a process's threads."""
    return {slice_ns(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()}


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for pid in pids_of(tmp_path, "store.sock"):  # a store outlives what a failed test leaves behind
        os.kill(pid, signal.SIGKILL)


async def generate(address: str) -> str:
    async with quire.AsyncClient(address) as client:
        await client.wait_ready(patient(READY_S))
        return (await client.generate("Once upon a time", max_tokens=8, temperature=0)).text


def complete(url: str) -> str:
    """The same over HTTP, by a client that tries again while nothing listens."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=10, timeout=patient(60)) as api:
        completion = api.completions.create(
            model=str(DEMO_MODEL), prompt="Once upon a time", max_tokens=8, temperature=0
        )
        return completion.choices[0].text


@pytest.mark.timeout(300)  # ten starts of services, one after another
def test_a_killed_service_comes_back_and_a_killed_supervisor_costs_no_accepted_request(data_dir: Path) -> None:
    serve = Serve(data_dir)
    address = serve.wait_ready()
    text = asyncio.run(generate(address))
    assert re.search(r"\w", text)
    assert serve.wait_for(r"memory\s+(.*)")[1].startswith("200 KV blocks of 16 tokens, 3200 tokens")
    assert re.search("embedded Valkey.*appendfsync always", serve.wait_for(r"^  store\s+(.*)")[1])

    services = children_of(serve.process.pid)
    assert set(services) == {"scheduler_svc", "worker_svc", "gateway_svc", "valkey-server"}
    usual_ns = slice_ns()
    if usual_ns:  # 0: this kernel has no slices of threads
        assert slices_of(services["scheduler_svc"]) == {SHORT_SLICE_NS}
        assert slice_ns(services["valkey-server"]) == SHORT_SLICE_NS
        assert slices_of(services["worker_svc"]) == {SHORT_SLICE_NS, usual_ns}  # connections', and the computing ones'
    os.kill(services["worker_svc"], signal.SIGKILL)
    serve.wait_for(r"worker-0 was killed by signal 9; starting it again")
    assert asyncio.run(generate(address)) == text
    url = serve.wait_for(r"^  http\s+(\S+)")[1]
    assert complete(url) == text
    os.kill(services["gateway_svc"], signal.SIGKILL)
    serve.wait_for(r"gateway was killed by signal 9; starting it again")
    assert complete(url) == text
    os.kill(services["valkey-server"], signal.SIGKILL)
    serve.wait_for(r"the embedded store ended")
    assert asyncio.run(generate(address)) == text
    with quire.Client(address) as client, client.stream("Once upon a time", max_tokens=400, ignore_eos=True) as stream:
        next(stream)
        os.kill(services["scheduler_svc"], signal.SIGKILL)
        serve.wait_for(r"scheduler was killed by signal 9")
        assert stream.completion().usage.completion_tokens == 400  # the next scheduler went on with it
    assert asyncio.run(generate(address)) == text

    services = children_of(serve.process.pid)
    with quire.Client(address) as client, client.stream("Once upon a time", max_tokens=64, ignore_eos=True) as stream:
        stream.accepted()
        assert serve.end(signal.SIGKILL) == -signal.SIGKILL
        assert stream.completion().usage.completion_tokens == 64  # the workers outlive the scheduler's last request
    again = Serve(data_dir, "--drain-timeout-s", "0", listen=address)  # waits for the old services, which had the port
    assert again.wait_ready() == address
    assert "already running" in again.wait_for(r"^  store\s+(.*)")[1]
    assert children_of(again.process.pid).keys() == {"scheduler_svc", "worker_svc", "gateway_svc"}
    assert not runs(services["scheduler_svc"])
    assert asyncio.run(generate(address)) == text

    services = children_of(again.process.pid)
    os.kill(services["worker_svc"], signal.SIGSTOP)  # so that the request cannot end before its scheduler
    with quire.Client(address) as client, client.stream("Once upon a time", max_tokens=400, ignore_eos=True) as stream:
        stream.accepted()
        assert again.end(signal.SIGKILL) == -signal.SIGKILL  # its services have no time to end what runs
        wait_until_ended(services["scheduler_svc"])
        with suppress(ProcessLookupError):  # the kernel has woken and hung up a stopped orphan, which may have ended
            os.kill(services["worker_svc"], signal.SIGCONT)
        last = Serve(data_dir, listen=address)
        assert stream.completion().usage.completion_tokens == 400  # what was accepted is served by the next ones
    last.wait_ready()

    other = Serve(data_dir)
    assert other.wait() == 2
    assert "--data-dir" in other.said[-1]
    assert last.end(signal.SIGTERM) == 0
    leftovers = (data_dir / "logs" / "scheduler.log").read_text()
    assert '"live": 1, "event": "requests left unfinished in the journal"' in leftovers
    assert not pids_of(data_dir, "store.sock")
    assert (data_dir / "store" / "appendonlydir").is_dir()


def led_by(address: str) -> str:
    """Wait until one of several schedulers leads and return its name; a restarting one does not answer."""

    async def leads(each: str) -> bool:
        async with quire.AsyncClient(each) as client:
            try:
                return await client.health("quire.v1.Cluster") is quire.Health.SERVING
            except quire.UnavailableError:
                return False

    async def leader() -> str:
        async with asyncio.timeout(patient(READY_S)):
            while True:
                leading = [each for each in address.split(",") if await leads(each)]
                if len(leading) == 1:
                    return leading[0]

    return asyncio.run(leader())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_with_a_standby_streams_go_on_when_the_leading_scheduler_is_killed(data_dir: Path) -> None:
    serve = Serve(data_dir, "--standby")
    address = serve.wait_ready()
    both = address.split(",")
    leader = led_by(address)
    (pid,) = pids_of(data_dir, f"scheduler_svc\0--listen\0{leader}\0")
    with quire.Client(address) as client:
        streams = [client.stream("Once upon a time", max_tokens=400, ignore_eos=True) for _ in range(3)]
        for stream in streams:
            next(stream)
        os.kill(pid, signal.SIGKILL)
        assert [stream.completion().usage.completion_tokens for stream in streams] == [400] * 3
        name = f"scheduler-{both.index(leader)}"
        serve.wait_for(rf"{name} was killed by signal 9; starting it again")
        successor = led_by(address)  # mostly who stood by; who was killed may be back before its lease has run out
        (other,) = [each for each in both if each != successor]
        assert asyncio.run(generate(other))  # it stands by, and says where to go
        with client.stream("Once upon a time", max_tokens=64, ignore_eos=True) as stream:
            stream.accepted()
            serve.process.send_signal(signal.SIGTERM)
            assert stream.completion().usage.completion_tokens == 64  # nobody hands over: who leads lets it end
    assert serve.wait() == 0
    assert "handing over" not in "".join((data_dir / "logs" / f"scheduler-{i}.log").read_text() for i in (0, 1))


def test_a_standby_without_a_store_to_share_is_refused(data_dir: Path) -> None:
    serve = Serve(data_dir, "--standby", "--store", "memory")
    assert serve.wait() == 2
    assert "several schedulers need a store" in serve.said[-1]


def test_ctrl_c_lets_a_running_request_end(data_dir: Path) -> None:
    serve = Serve(data_dir, "--store", "memory", "--verbose")
    address = serve.wait_ready()
    assert "NOT DURABLE" in serve.wait_for(r"^  store\s+(.*)")[1]
    with quire.Client(address) as client, client.stream("Once upon a time", max_tokens=64, ignore_eos=True) as stream:
        stream.accepted()
        serve.process.send_signal(signal.SIGINT)
        completion = stream.completion()
    assert completion.usage.completion_tokens == 64
    assert serve.wait() == 0
    assert any('"event": "draining"' in line for line in serve.said)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--num-blocks", "0"), "--num-blocks"),
        (("--redis-url", "redis://127.0.0.1:1"), "redis://127.0.0.1:1 cannot be reached"),
    ],
)
def test_what_cannot_be_served_ends_with_one_sentence(
    data_dir: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    serve = Serve(data_dir, *arguments)
    assert serve.wait() == 2
    assert sentence in serve.said[-1]
    assert "Traceback" not in "".join(serve.said)


def test_an_unknown_model_folder_is_named(data_dir: Path) -> None:
    serve = Serve(data_dir, model=f"{data_dir}/no-such-model")
    assert serve.wait() == 2
    assert f"{data_dir}/no-such-model" in serve.said[-1]
    assert not pids_of(data_dir, "store.sock")
