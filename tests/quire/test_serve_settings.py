"""Settings of `quire serve`: flag over variable over file, and what the services are told."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli.app import app
from quire.cli.serve_settings import RESERVED, SERVICES, passed_fields, settle_all, share_of_cores
from quire.gateway_settings import GatewaySettings
from quire.scheduler_settings import SchedulerSettings
from quire.settings import INTERNAL, Settings, parse, settle
from quire.worker_settings import WorkerSettings
from tests.patience import patient


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIRE_CONFIG", "REDIS_URL", "QUIRE_SERVE_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("QUIRE_CONFIG", "")  # restored by monkeypatch after the command has set it
    monkeypatch.delenv("QUIRE_CONFIG")


# What both services have, each with a meaning of its own, is said in their own tables.
TOLD_APART: dict[type[Settings], set[str]] = {
    GatewaySettings: set(),
    SchedulerSettings: {"advertise", "metrics_listen"},
    WorkerSettings: {"advertise", "drain_timeout_s", "group_address", "listen", "metrics_listen", "rank"},
}


def settled(*arguments: str, table: str = "serve") -> dict[str, object]:
    result = CliRunner().invoke(app, ["serve", *arguments, "--print-config"])
    assert result.exit_code == 0, result.stderr
    return dict(tomllib.loads(result.stdout)[table])


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "quire.toml"
    file.write_text('[serve]\nmodel = "of-the-file"\nworkers = 2\nblock_size = 32\n[worker]\nthreads = 3\n')
    config = ("--config", str(file))
    assert settled(*config)["model"] == "of-the-file"
    monkeypatch.setenv("QUIRE_SERVE_WORKERS", "3")
    monkeypatch.setenv("QUIRE_SERVE_MODEL", "of-the-environment")
    both = settled(*config)
    assert (both["workers"], both["model"]) == (3, "of-the-environment")
    assert settled(*config, table="worker")["block_size"] == 32
    assert settled("of-the-flag", *config, "--workers", "4")["workers"] == 4


def test_what_is_printed_settles_the_same_again(tmp_path: Path) -> None:
    flags = ("some-model", "--max-queue", "7", "--data-dir", str(tmp_path), "--verbose")
    file = tmp_path / "again.toml"
    file.write_text(CliRunner().invoke(app, ["serve", *flags, "--print-config"]).stdout)
    for table in ("serve", "scheduler", "worker", "gateway"):
        first = settled(*flags, table=table)
        assert settled("--config", str(file), table=table) == first


def test_the_redis_url_of_the_environment_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere:6379")
    assert settled("m")["redis_url"] == "redis://elsewhere:6379"
    for url in ("unix:///tmp/s", "rediss+cluster://a:1,b:2"):
        assert settled("m", "--redis-url", url)["redis_url"] == url


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "quire serve MODEL"),
        (["m", "--workers", "0"], "--workers"),
        (["m", "--store", "tape"], "--store"),
        (["m", "--appendfsync", "no"], "--appendfsync"),
        (["m", "--preemption", "abort"], "--preemption"),
        (["m", "--order", "lifo"], "--order"),
        (["m", "--device", "gpu"], "--device: 'gpu' does not fit: device to compute on: cpu, cuda, cuda:N"),
        (
            ["m", "--deployment", "a/b"],
            "--deployment: 'a/b' does not fit: name that separates deployments on one store: 1 to 64 letters",
        ),
        (["m", "--keepalive-time-s", "inf"], "--keepalive-time-s"),
        (["m", "--max-connections", "3000000000"], "--max-connections"),
        (["m", "--lease-ms", "150000000"], "--lease-ms"),  # nobody would follow a dead leader for days
        (["m", "--num-host-blocks", "-1"], "--num-host-blocks"),
        (["m", "--listen", "7847"], "--listen: write host:port"),
        (["m", "--listen", "0.0.0.0:70000"], "--listen: write host:port, with a port of at most 65535"),
        (["m", "--config", "."], ". is a folder"),
        (["m", "--redis-url", "http://x"], "--redis-url: write redis://"),
        (["m", "--config", "nowhere.toml"], "nowhere.toml"),
        (
            ["m", "--data-dir", "~nobody-of-this-name/data"],
            "--data-dir: there is no home folder for ~nobody-of-this-name/data",
        ),
    ],
)
def test_settings_that_make_no_sense_are_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments, "--print-config"])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("this is not toml", "quire.toml is not valid TOML"),
        ("[srve]\nworkers = 2\n", "there is no table 'srve'; use [serve]"),
        ("workers = 2\n", "there is no table 'workers'; use [serve]"),
        ("[serve]\nworker = 2\n", "no setting 'worker'; did you mean 'workers'?"),
    ],
)
def test_a_file_that_would_not_be_read_is_one_line(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "quire.toml"
    file.write_text(content)
    result = CliRunner().invoke(app, ["serve", "m", "--config", str(file), "--print-config"])
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert message in result.stderr


def test_help_names_the_tables_of_the_file() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"]).stdout
    assert "tables serve, scheduler, worker and gateway" in " ".join(shown.split())


def test_services_are_told_what_was_given_and_nothing_else() -> None:
    settled = settle_all({"model": "m", "num_blocks": "9", "max_num_seqs": "4", "max_queue_requests": 5}, None)
    assert set(settled.scheduler_flags) == {"--max-num-seqs=4", "--max-queue-requests=5"}
    threads = f"--threads={settled.worker.threads}"
    assert set(settled.worker_flags) == {"--num-blocks=9", "--max-num-seqs=4", threads}


def test_the_scheduler_is_told_the_policies_and_the_worker_its_swap_pool() -> None:
    flags = {"preemption": "swap", "order": "edf", "num_host_blocks": "0", "graphs": False, "prefix_cache": True}
    settled = settle_all({"model": "m", **flags}, None)
    assert set(settled.scheduler_flags) == {"--preemption=swap", "--order=edf", "--prefix-cache"}
    assert {"--num-host-blocks=0", "--no-graphs"} <= set(settled.worker_flags)


@pytest.mark.parametrize("kind", SERVICES)
def test_every_setting_of_a_service_is_an_option_of_serve_or_is_settled_by_it(kind: type[Settings]) -> None:
    """Each setting is a flag, a variable, and in both tables; the printed settings show its value."""
    shown = CliRunner().invoke(app, ["serve", "--help"]).stdout
    parsed = CliRunner().invoke(app, ["serve", "m", "--print-config"]).stdout
    for name in passed_fields(kind):
        assert f"--{name.replace('_', '-')}" in shown
        value = getattr(settle_all({"model": "m"}, None), kind.section)
        assert (getattr(value, name) is None) or f"\n{name} = " in parsed
    untold = set(kind.model_fields) - set(passed_fields(kind))
    assert untold == {*RESERVED[kind], *(INTERNAL & set(kind.model_fields)), *TOLD_APART[kind]}


def test_each_service_understands_what_it_is_told() -> None:
    """Every flag that is passed on has the name and the form that the service itself takes."""
    for kind in SERVICES:
        model = {"model": "m"} if kind is WorkerSettings else {}
        defaults = settle(kind, model, {})
        given = {name: value for name in passed_fields(kind) if (value := getattr(defaults, name)) is not None}
        settled = settle_all({"model": "m", **given}, None)
        flags: tuple[str, ...] = getattr(settled, f"{kind.section}_flags")
        assert len(flags) >= len(given)
        again = parse(kind, [*flags, *(["--model", "m"] if kind is WorkerSettings else [])])
        assert again.model_dump(exclude={"threads"}) == defaults.model_dump(exclude={"threads"})


def test_a_value_comes_from_the_nearest_place_of_four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """serve's flag, serve's variable, serve's table, the service's variable, the service's table."""
    file = tmp_path / "quire.toml"
    file.write_text("[worker]\nblock_size = 1\n")
    config = ("--config", str(file))
    assert settled("m", *config, table="worker")["block_size"] == 1
    monkeypatch.setenv("QUIRE_WORKER_BLOCK_SIZE", "2")
    assert settled("m", *config, table="worker")["block_size"] == 2
    file.write_text("[worker]\nblock_size = 1\n[serve]\nblock_size = 3\n")
    assert settled("m", *config, table="worker")["block_size"] == 3
    monkeypatch.setenv("QUIRE_SERVE_BLOCK_SIZE", "4")
    assert settled("m", *config, table="worker")["block_size"] == 4
    assert settled("m", *config, "--block-size", "5", table="worker")["block_size"] == 5


def test_threads_told_to_the_worker_itself_are_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settled("m", table="worker")["threads"] >= 1  # type: ignore[operator]
    file = tmp_path / "quire.toml"
    file.write_text("[worker]\nthreads = 3\n")
    assert settled("m", "--config", str(file), table="worker")["threads"] == 3
    assert settled("m", "--config", str(file), "--threads", "5", table="worker")["threads"] == 5
    monkeypatch.delenv("QUIRE_CONFIG")
    monkeypatch.setenv("QUIRE_WORKER_THREADS", "7")
    assert settled("m", table="worker")["threads"] == 7
    assert not any("threads" in each for each in settle_all({"model": "m"}, None).worker_flags)


def test_workers_share_all_cores() -> None:
    assert share_of_cores(16, 1) == 16
    assert share_of_cores(16, 3) == 5
    assert share_of_cores(2, 1) == 2
    assert share_of_cores(1, 4) == 1


def test_the_data_folder_follows_the_desktop_convention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert settled("m")["data_dir"] == str(tmp_path / "quire")
    monkeypatch.setenv("XDG_STATE_HOME", "")
    assert settled("m")["data_dir"] == str(Path.home() / ".local" / "state" / "quire")


def test_both_schedulers_are_told_that_they_may_have_to_stand_by() -> None:
    assert settled("m", "--standby")["standby"] is True
    assert settled("m")["standby"] is False


def refusal(*arguments: str) -> str:
    """Return the one line with which a call was refused."""
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), result.output
    return str(result.stderr)


@pytest.mark.parametrize("name", ["WORKER_DTYP", "SCHEDULER_ODER", "SERVE_WORKRS", "SERVE_KV_DTYP", "SERV_WORKERS"])
def test_a_misspelt_variable_is_refused_with_the_nearest_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"QUIRE_{name}", "1")
    right = {"DTYP": "DTYPE", "ODER": "ORDER", "WORKRS": "WORKERS", "SERV": "SERVE"}
    meant = "_".join(right.get(part, part) for part in name.split("_"))
    assert f"QUIRE_{name} is not a setting of Quire; did you mean QUIRE_{meant}?" in refusal("m")


@pytest.mark.parametrize(
    ("service", "addresses"),
    [("SERVE", "QUIRE_SERVE_LISTEN and QUIRE_SERVE_HTTP"), ("GATEWAY", "QUIRE_GATEWAY_LISTEN")],
)
def test_a_port_alone_is_refused_with_the_address_that_has_it(
    service: str, addresses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it was taken for a variable that Kubernetes sets for a service, and had no effect."""
    monkeypatch.setenv(f"QUIRE_{service}_PORT", "9000")
    assert f"QUIRE_{service}_PORT is not a setting of Quire: a port is a part of {addresses}, host:port" in refusal("m")


def test_variables_of_others_that_begin_alike_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other variables with this prefix: those that Kubernetes sets for services of these names, and other programs'."""
    for name in ("WORKER_SERVICE_HOST", "WORKER_PORT", "SCHEDULER_PORT_7847_TCP_ADDR", "TAG", "RELEASE_NOTES"):
        monkeypatch.setenv(f"QUIRE_{name}", "tcp://10.0.0.1:7847")
    settled("m")


@pytest.mark.parametrize(
    ("table", "key", "near"),
    [("scheduler", "oder", "order"), ("worker", "kv_dtyp", "kv_dtype"), ("serve", "max_que", "max_queue")],
)
def test_a_misspelt_key_is_refused_in_every_table(table: str, key: str, near: str, tmp_path: Path) -> None:
    file = tmp_path / "quire.toml"
    file.write_text(f"[{table}]\n{key} = 1\n")
    assert f"[{table}] has no setting {key!r}; did you mean {near!r}?" in refusal("m", "--config", str(file))


@pytest.mark.parametrize("option", ["--data-dir", "--listen", "--redis-url", "--dtype", "--worker-id", ""])
def test_an_empty_value_is_refused(option: str) -> None:
    if option == "":
        assert "MODEL is empty" in refusal("")
    elif option == "--worker-id":
        assert "worker-id" in CliRunner().invoke(app, ["serve", "m", option, ""]).stderr  # not serve's to take
    else:
        assert f"{option} is empty" in refusal("m", option, "")


def test_a_wrong_value_is_called_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "quire.toml"
    assert refusal("m", "--dtype", "fp16").startswith("quire: --dtype: ")
    file.write_text("[serve]\ndtype = 'fp16'\n")
    assert refusal("m", "--config", str(file)).startswith("quire: [serve] dtype: ")
    file.write_text("[worker]\ndtype = 'fp16'\n")
    assert refusal("m", "--config", str(file)).startswith("quire: [worker] dtype: ")
    monkeypatch.setenv("QUIRE_WORKER_DTYPE", "fp17")
    assert refusal("m", "--config", str(file)).startswith("quire: QUIRE_WORKER_DTYPE: ")
    monkeypatch.setenv("QUIRE_SERVE_DTYPE", "fp18")
    assert refusal("m", "--config", str(file)).startswith("quire: QUIRE_SERVE_DTYPE: ")


@pytest.mark.parametrize(("name", "instead"), [("WORKER_MODEL", "MODEL"), ("SCHEDULER_LISTEN", "--listen")])
def test_what_serve_settles_for_a_service_is_not_ignored_but_refused(
    name: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, _, key = name.lower().partition("_")
    file = tmp_path / "quire.toml"
    file.write_text(f"[{service}]\n{key} = 'x:1'\n")
    assert f"give {instead}" in refusal("m", "--config", str(file))
    monkeypatch.delenv("QUIRE_CONFIG")
    monkeypatch.setenv(f"QUIRE_{name}", "x:1")
    assert f"QUIRE_{name}: quire serve sets this itself; leave it out, and give {instead}" in refusal("m")


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in SERVICES for name in sorted(INTERNAL & set(kind.model_fields))]
)
def test_what_is_for_starting_one_process_is_refused_for_those_of_serve(
    kind: type[Settings], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log file would be ignored; print_config would end each process at once."""
    file = tmp_path / "quire.toml"
    file.write_text(f"[{kind.section}]\n{name} = 1\n")
    said = refusal("m", "--config", str(file))
    assert f"[{kind.section}] {name}: quire serve sets this itself; leave it out" in said
    assert ("--data-dir" in said) is (name == "log_file")
    monkeypatch.delenv("QUIRE_CONFIG", raising=False)
    variable = f"{kind.prefix()}{name.upper()}"
    monkeypatch.setenv(variable, "1")
    assert f"{variable}: quire serve sets this itself; leave it out" in refusal("m")


@pytest.mark.parametrize(
    "flags",
    [
        ("--store", "memory", "--redis-url", "redis://x"),
        ("--appendfsync", "everysec", "--redis-url", "redis://x"),
        ("--appendfsync", "everysec", "--store", "memory"),
        ("--num-blocks", "3", "--kv-memory-fraction", "0.5"),
    ],
)
def test_options_that_contradict_each_other_are_refused(flags: tuple[str, ...]) -> None:
    refusal("m", *flags, "--print-config")


def test_a_store_chosen_by_flag_wins_over_the_url_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere:6379")
    assert "redis_url" not in settled("m", "--store", "memory")


@pytest.mark.parametrize("url", ["redis://:pw-1@h:1/0", "redis://u:pw-1@h:1", "unix:///s?password=pw-1", "x://:pw-1@h"])
def test_a_password_is_printed_by_nothing(url: str) -> None:
    result = CliRunner().invoke(app, ["serve", "m", "--redis-url", url, "--print-config"])
    assert "pw-1" not in result.output
    assert "***" in result.output


def test_a_flag_that_is_hidden_for_its_password_counts_as_the_flag_that_it_is() -> None:
    shown = []
    for url in ("redis://h:1", "redis://:pw-1@h:1"):
        environment = {**os.environ, "QUIRE_SERVE_STORE": "memory"}
        command = [sys.executable, "-m", "quire.cli", "serve", "m", "--redis-url", url, "--print-config"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(60))
        assert done.returncode == 0, done.stderr
        shown.append([line for line in done.stdout.splitlines() if "redis_url" not in line])
    assert shown[0] == shown[1]


@pytest.mark.parametrize("only", ["its-name", "0123abcd"], ids=["name", "fingerprint"])
def test_only_the_model_that_is_served_may_be_the_only_one(only: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settled("m", "--model-name", "its-name", "--only-model", only, table="scheduler")["only_model"] == only
    monkeypatch.setenv("QUIRE_SCHEDULER_ONLY_MODEL", "another")
    result = CliRunner().invoke(app, ["serve", "m", "--print-config"])
    assert result.exit_code == 2
    for each in ("QUIRE_SCHEDULER_ONLY_MODEL", "'another'", "'m'", "--model-name"):
        assert each in result.stderr
