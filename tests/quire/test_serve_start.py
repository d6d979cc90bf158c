"""Start of `quire serve`: it reports its steps, refuses early, and shows no password to anybody."""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.cli.serve_command import LEAST_FILES
from quire.cli.supervisor.start_view import StartView
from tests.patience import patient
from tests.quire.serve_processes import ServeProcesses
from tests.services import DEMO_MODEL, ROOT, free_address
from tests.valkey import ValkeyProcess

PASSWORD = "pw-1f9c"
WORKER_NUMBER = re.compile(r"--worker-number=(\d+)")


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


def log_texts(data_dir: Path) -> str:
    return "".join(each.read_text(errors="replace") for each in (data_dir / "logs").rglob("*.log*"))


@pytest.mark.timeout(300)
def test_a_start_says_what_each_service_does_and_a_clean_end_logs_no_warning(data_dir: Path) -> None:
    serve = ServeProcesses(data_dir, "--kernels", "torch", environment={"QUIRE_NATIVE": "off"})
    try:
        serve.wait_for("generate --address")
        said = serve.said
        places = [
            said.index(f"worker-0 {phase}\n") for phase in ("checking", "starting", "loading", "measuring", "ready")
        ]
        assert places == sorted(places)
        assert "scheduler ready" in said and "store ready" in said
        serve.process.terminate()
        assert serve.wait() == 0
    finally:
        serve.clean_up()
    services = [(data_dir / "logs" / f"{name}.log").read_text() for name in ("scheduler", "worker-0")]
    entries = [json.loads(line) for text in services for line in text.splitlines()]
    assert [each for each in entries if each["level"] not in ("info", "debug")] == []


@pytest.mark.timeout(300)
def test_on_a_terminal_one_line_lives_and_warnings_of_workers_are_in_the_greeting(data_dir: Path) -> None:
    """The slow path is chosen when the native kernels are switched off, and the worker knows why."""
    serve = ServeProcesses(data_dir, terminal=True, environment={"QUIRE_NATIVE": "off", "TERM": "xterm"})
    try:
        serve.wait_for("generate --address")
        before, _, greeting = serve.said.partition("Quire is ready")
        assert re.search(r"dtype +b?float(16|32): ", greeting) and re.search(
            r"takes +weights \d.*sequences of 2048", greeting
        )
        assert "without native kernels steps are slower: native kernels are switched off by QUIRE_NATIVE" in greeting
        assert "\r\x1b[K0 s: " in before
        left = before.split("\n")[-1].rpartition("\r\x1b[K")[2]
        assert re.sub(r"\x1b\[[\d;]*m", "", left) == ""  # nothing of it stays
        assert "worker-0 loading" in before or "worker-0 measuring" in before
    finally:
        serve.clean_up()


def refused(*arguments: str, environment: dict[str, str] | None = None) -> tuple[list[str], float]:
    """The lines of a call that ends with exit code 2, and the processor time that it took, in seconds."""
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "quire.cli", "serve", *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=100,
        env={**os.environ, "COLUMNS": "500", "QUIRE_SERVE_HTTP": "127.0.0.1:0", **(environment or {})},
    )  # fmt: skip
    after = os.times()
    assert done.returncode == 2, done
    used_s = after.children_user + after.children_system - before.children_user - before.children_system
    return [*done.stdout.splitlines(), *done.stderr.splitlines()], used_s


def broken(folder: Path, **changes: object) -> str:
    """A copy of the demo model with another config."""
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        "folder", "file", "architecture", "dtype", "port", "data folder", "key", "variable", "device", "tokenizer",
        "kv dtype", "pool", "pool bytes", "share", "positions",
    ],
)  # fmt: skip
def test_what_can_be_seen_before_a_model_is_loaded_is_refused_at_once(case: str, tmp_path: Path) -> None:
    """One line says what to do, before torch is imported: measured in processor time, since machines are busy."""
    arguments, named, environment = [str(DEMO_MODEL)], case, {}
    taken = socket.create_server(("127.0.0.1", 0))
    if case == "folder":
        arguments, named = [f"{tmp_path}/no-such-model"], "no-such-model"
    elif case == "file":
        arguments, named = [str(DEMO_MODEL / "config.json")], "is a file"
    elif case == "architecture":
        arguments, named = [broken(tmp_path / "m", architectures=["NoSuchModel"], model_type="no-such")], "NoSuchModel"
    elif case == "tokenizer":
        folder = broken(tmp_path / "m")
        (Path(folder) / "tokenizer.json").write_text('{"version": "1.0", "model": 7}')
        arguments, named = [folder], "tokenizer.json"
    elif case == "dtype":
        arguments += ["--dtype", "fp16"]
        named = "--dtype"
    elif case == "device":
        arguments += ["--device", "tpu"]
        named = "--device"
    elif case == "kv dtype":
        arguments += ["--device", "cpu", "--kv-dtype", "fp8"]
        named = "--kv-dtype fp8"
    elif case == "pool":
        arguments += ["--num-blocks", "2", "--max-model-len", "100"]
        named = "give --num-blocks 7"
    elif case == "pool bytes":
        environment = {"QUIRE_SERVE_KV_MEMORY_BYTES": "100"}
        named = "worker: QUIRE_SERVE_KV_MEMORY_BYTES 100 is less than the "
    elif case == "share":
        arguments += ["--device", "cpu", "--kv-memory-bytes", "99999999999999"]
        named = "worker: --kv-memory-bytes 99999999999999 is a pool of "
    elif case == "positions":
        (tmp_path / "quire.toml").write_text("[serve]\nmax_model_len = 99999\n")
        arguments += ["--config", str(tmp_path / "quire.toml")]
        named = "worker: [serve] max_model_len 99999 is more than the 2048 positions of the model: give at most [serve]"
    elif case == "port":
        named = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments += ["--listen", named]
    elif case == "data folder":
        (tmp_path / "plain").write_text("")
        arguments += ["--data-dir", str(tmp_path / "plain" / "below")]
        named = "--data-dir"
    elif case == "key":
        (tmp_path / "quire.toml").write_text("[worker]\nkv_dtyp = 'int8'\n")
        arguments += ["--config", str(tmp_path / "quire.toml")]
        named = "did you mean 'kv_dtype'"
    else:
        environment = {"QUIRE_WORKER_KV_DTYP": "int8"}
        named = "did you mean QUIRE_WORKER_KV_DTYPE"
    if "--data-dir" not in arguments:
        arguments += ["--data-dir", str(tmp_path / "data")]
    if "--listen" not in arguments:
        arguments += ["--listen", "127.0.0.1:0"]
    lines, used_s = refused(*arguments, environment=environment)
    taken.close()
    said = [line for line in lines if "starting" not in line and "checking" not in line]
    assert len(said) == 1 and named in said[0], lines
    assert used_s < patient(1.0)  # torch alone takes three
    assert not (tmp_path / "data" / "store" / "appendonlydir").exists()  # nothing was started


def test_a_limit_of_open_files_that_holds_no_connections_is_refused(data_dir: Path) -> None:
    serve = shlex.join([sys.executable, "-m", "quire.cli", "serve", str(DEMO_MODEL), "--data-dir", str(data_dir)])
    limited = f"ulimit -n {LEAST_FILES - 1}; exec {serve}"
    done = subprocess.run(["sh", "-c", limited], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and not data_dir.exists()
    assert done.stderr == (
        f"quire: a process may open {LEAST_FILES - 1} files here, and {LEAST_FILES} are needed: raise the limit "
        "(ulimit -n)\n"
    )


def test_a_working_folder_that_was_removed_is_refused(tmp_path: Path) -> None:
    serve = shlex.join([sys.executable, "-m", "quire.cli", "serve", str(DEMO_MODEL), "--data-dir", "data"])
    removed = f"mkdir gone; cd gone; rmdir ../gone; exec {serve}"
    done = subprocess.run(
        ["sh", "-c", removed], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("quire: the working folder does not exist any more"), done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_worker_that_refuses_its_configuration_ends_everything_with_its_sentence(data_dir: Path) -> None:
    """Only a loaded model shows this; one of two workers is enough, and it is not restarted again and again."""
    serve = ServeProcesses(data_dir, "--workers", "2", "--num-host-blocks", "4000000", "--block-size", "256")
    try:
        numbers: set[str] = set()  # of workers, by which they take devices; a worker loads torch before it refuses
        while serve.process.poll() is None:
            numbers |= {number for line in serve.living().values() for number in WORKER_NUMBER.findall(line)}
            time.sleep(0.05)
        assert numbers == {"0", "1"}
        assert serve.wait() == 2
        serve.wait_for("give at most --num-host-blocks")
        last = serve.said.splitlines()[-1]
        assert last.startswith("quire: worker: --num-host-blocks 4000000 of") and "starting it again" not in serve.said
        assert serve.living() == {}
    finally:
        serve.clean_up()


def processes_and_logs(serve: ServeProcesses, data_dir: Path) -> str:
    """Collect what other users, or readers of logs, could see."""
    return "\n".join([*serve.living().values(), log_texts(data_dir), serve.said])


@pytest.fixture
def guarded() -> Iterator[str]:
    """The address of a store that asks for a password."""
    with ValkeyProcess() as valkey:
        address = free_address()
        valkey.command("CONFIG", "SET", "port", address.rpartition(":")[2])
        valkey.command("CONFIG", "SET", "appendonly", "no")  # of which the scheduler warns
        valkey.command("CONFIG", "SET", "requirepass", PASSWORD)
        yield f"{address}/0"


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["variable", "flag", "flag and word"])
def test_the_password_of_a_store_is_in_no_command_line_and_no_log(guarded: str, data_dir: Path, way: str) -> None:
    url = f"redis://:{PASSWORD}@{guarded}"
    arguments, environment = [], {}
    if way == "variable":
        environment = {"REDIS_URL": url}
    elif way == "flag":
        arguments = [f"--redis-url={url}"]
    else:
        arguments = ["--redis-url", url, "--store", "auto"]
    serve = ServeProcesses(data_dir, "--verbose", "--log-level", "debug", *arguments, environment=environment)
    try:
        serve.wait_for("generate --address")
        seen = processes_and_logs(serve, data_dir)
        assert "scheduler_svc" in seen and "worker_svc" in seen
        assert PASSWORD not in seen
        assert f"redis://:***@{guarded}" in seen
        greeting = serve.said.partition("Quire is ready")[2]
        assert "warning  NOT DURABLE: the store keeps no append-only file" in greeting
        serve.process.terminate()
        assert serve.wait() == 0
        assert PASSWORD not in processes_and_logs(serve, data_dir)
    finally:
        serve.clean_up()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("wrong", ["redis://:{}@127.0.0.1:1/0", "redis://u:x{}@{}", "redis://:a/{}@127.0.0.1:1"])
def test_a_store_that_cannot_be_used_is_named_without_its_password(guarded: str, data_dir: Path, wrong: str) -> None:
    url = wrong.format(PASSWORD, guarded)
    serve = ServeProcesses(data_dir, environment={"REDIS_URL": url})
    try:
        assert serve.wait() == 2
        serve.wait_for("***@")
        assert PASSWORD not in processes_and_logs(serve, data_dir)
        assert "Traceback" not in processes_and_logs(serve, data_dir)
    finally:
        serve.clean_up()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_second_quire_serve_on_one_store_is_refused_and_the_first_leads_on(tmp_path: Path) -> None:
    """Both would fence each other for ever, as each restarts its scheduler."""
    with ValkeyProcess() as valkey:
        first = ServeProcesses(tmp_path / "one", environment={"REDIS_URL": valkey.url})
        second = None
        try:
            first.wait_for("generate --address")
            address = first.said.split("is ready at ")[1].split()[0]
            with quire.Client(address) as client:
                epoch = client.stats().epoch
                second = ServeProcesses(tmp_path / "two", environment={"REDIS_URL": valkey.url})
                assert second.wait() == 2
                second.wait_for(f"the scheduler at {address} leads this deployment in the same store")
                assert "--deployment" in second.said
                assert client.stats().epoch == epoch
            assert "starting it again" not in first.said
            third = ServeProcesses(tmp_path / "two", "--deployment", "b", environment={"REDIS_URL": valkey.url})
            try:
                third.wait_for("generate --address")
            finally:
                third.clean_up()
            scheduler = next(pid for pid, command in first.living().items() if "scheduler_svc" in command)
            os.kill(scheduler, signal.SIGKILL)  # the next one is not kept by what its predecessor has left
            first.wait_for("starting it again")
            with quire.Client(address) as client:
                assert client.generate("Once", max_tokens=2).text
        finally:
            first.clean_up()
            if second is not None:
                second.clean_up()


@pytest.mark.parametrize(("form", "is_json"), [("auto", False), ("json", True), ("console", False)])
def test_logs_are_lines_to_read_on_a_terminal_unless_json_is_asked_for(form: str, is_json: bool) -> None:
    ours, theirs = pty.openpty()
    code = (
        "from quire.cli.supervisor.announcer import Announcer\n"
        f'Announcer({form!r}).print_log_line(\'{{"event": "listening", "level": "info", "service": "s"}}\')'
    )
    subprocess.run([sys.executable, "-c", code], stdout=theirs, stderr=theirs, check=True)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    os.close(theirs)
    assert shown.startswith("{") is is_json
    assert is_json or "info    s: listening" in shown


def test_phases_are_shown_in_the_words_of_a_person() -> None:
    view = StartView()
    view.begin_service("worker-0")
    assert view.set_phase("worker-0", "checkpoint") == "checking"
    assert view.set_phase("worker-0", "weights", 0.0) == "loading"
    assert view.set_phase("worker-0", "weights", 0.436) is None  # the same phase
    view.set_phase("scheduler", "ready")
    assert view.line(12.3) == "12 s: worker-0 loading 44%, scheduler ready"
    assert view.set_phase("worker-0", "compiling") == "compiling kernels (only the first time)"
    assert [view.set_phase("worker-0", each) for each in ("kv_pool", "warm_up")] == ["measuring", None]
    view.begin_service("worker-0")
    assert "starting" in view.line(13)


def test_a_warning_of_all_workers_is_told_once() -> None:
    view = StartView()
    for name in ("scheduler", "worker-0", "worker-1"):
        view.begin_service(name)
    for name in ("worker-0", "worker-1", "worker-1"):
        view.add_warning(name, "slow")
    view.add_warning("worker-1", "odd")
    view.add_notice("worker-0", "dtype", "bfloat16")
    view.add_notice("worker-0", "threads", "1")
    view.add_notice("worker-1", "threads", "1")
    assert view.warnings() == ["slow", "worker-1: odd"]
    assert view.notices() == [("dtype", "worker-0: bfloat16"), ("threads", "1")]
