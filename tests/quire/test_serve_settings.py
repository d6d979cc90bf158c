"""Settings of `quire serve`: flag over variable over file, and what the services are told."""

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli.app import app
from quire.cli.serve_settings import ServeSettings, share_of_cores


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIRE_CONFIG", "REDIS_URL", "QUIRE_SERVE_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("QUIRE_CONFIG", "")  # restored by monkeypatch after the command has set it
    monkeypatch.delenv("QUIRE_CONFIG")


def settled(*arguments: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["serve", *arguments, "--print-config"])
    assert result.exit_code == 0, result.stderr
    return dict(tomllib.loads(result.stdout)["serve"])


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
    assert (both["workers"], both["model"], both["block_size"]) == (3, "of-the-environment", 32)
    assert settled("of-the-flag", *config, "--workers", "4")["workers"] == 4


def test_what_is_printed_settles_the_same_again(tmp_path: Path) -> None:
    flags = ("some-model", "--max-queue", "7", "--data-dir", str(tmp_path), "--verbose")
    file = tmp_path / "again.toml"
    file.write_text(CliRunner().invoke(app, ["serve", *flags, "--print-config"]).stdout)
    first = settled(*flags)
    assert settled("--config", str(file)) == first


def test_the_redis_url_of_the_environment_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere:6379")
    assert settled("m")["redis_url"] == "redis://elsewhere:6379"
    assert settled("m", "--redis-url", "unix:///tmp/s")["redis_url"] == "unix:///tmp/s"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "quire serve MODEL"),
        (["m", "--workers", "0"], "--workers"),
        (["m", "--store", "tape"], "--store"),
        (["m", "--appendfsync", "no"], "--appendfsync"),
        (["m", "--preemption", "abort"], "--preemption"),
        (["m", "--order", "lifo"], "--order"),
        (["m", "--num-host-blocks", "-1"], "--num-host-blocks"),
        (["m", "--listen", "7847"], "--listen: write host:port"),
        (["m", "--redis-url", "http://x"], "--redis-url: write redis://"),
        (["m", "--config", "nowhere.toml"], "nowhere.toml"),
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
        ("this is not toml", "quire.toml is no TOML"),
        ("[srve]\nworkers = 2\n", "'srve' is none of the tables"),
        ("workers = 2\n", "'workers' is none of the tables"),
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
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"})
    assert "tables serve, scheduler and worker" in result.stdout


def test_services_are_told_what_was_given_and_nothing_else() -> None:
    settings = ServeSettings(model="m", num_blocks=9, max_num_seqs=4, max_queue=5, threads=2)
    assert settings.scheduler_flags() == [
        "--max-num-seqs=4",
        "--max-queue-requests=5",
        "--drain-timeout-s=30.0",
    ]
    assert settings.worker_flags() == ["--num-blocks=9", "--threads=2", "--max-num-seqs=4"]


def test_the_scheduler_is_told_the_policies_and_the_worker_its_swap_pool() -> None:
    flags = ("--preemption", "swap", "--order", "edf", "--num-host-blocks", "0")
    settings = ServeSettings(**settled("m", *flags))  # type: ignore[arg-type]
    assert {"--preemption=swap", "--order=edf"} <= set(settings.scheduler_flags())
    assert "--num-host-blocks=0" in settings.worker_flags()


def test_threads_told_to_the_worker_itself_are_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "threads" in settled("m")
    file = tmp_path / "quire.toml"
    file.write_text("[worker]\nthreads = 3\n")
    assert "threads" not in settled("m", "--config", str(file))
    assert settled("m", "--config", str(file), "--threads", "5")["threads"] == 5
    monkeypatch.delenv("QUIRE_CONFIG")
    monkeypatch.setenv("QUIRE_WORKER_THREADS", "3")
    assert "threads" not in settled("m")


def test_workers_share_all_cores_but_one() -> None:
    assert share_of_cores(16, 1) == 15
    assert share_of_cores(16, 2) == 7
    assert share_of_cores(2, 1) == 1
    assert share_of_cores(1, 4) == 1


def test_the_data_folder_follows_the_desktop_convention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert ServeSettings(model="m").folder == tmp_path / "quire"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert ServeSettings(model="m").folder == Path.home() / ".local" / "state" / "quire"


def test_both_schedulers_are_told_that_they_may_have_to_stand_by() -> None:
    assert settled("m", "--standby")["standby"] is True
    assert settled("m")["standby"] is False
    assert "--standby" in ServeSettings(model="m", standby=True).scheduler_flags()
    assert "--standby" not in ServeSettings(model="m").scheduler_flags()
