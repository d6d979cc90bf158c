"""A setting that is refused is called as it was typed: by its flag, its variable or its key in the file.

Every setting of scheduler and worker is given a value that cannot be, each in every way in which it can be given.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_origin

import pytest

from quire.cli.serve_options import _plain_type
from quire.cli.serve_settings import SERVICES, passed_fields, settle_all
from quire.scheduler_settings import SchedulerSettings
from quire.settings import Settings, parse
from quire.typed_names import as_typed, flag_of
from quire.worker_settings import WorkerSettings

KINDS = SERVICES
BAD_TEXTS = {
    "scheduler": "nonsense",
    "advertise": "a:b:c:d",
    "cors_origins": "chat.example",
    "group_address": "a:b:c:d",
    "worker_id": "x" * 200,
    "model_name": "x" * 2000,
    "only_model": "x" * 2000,
    "peer_tls_server_name": "x" * 300,
}
# Texts that only whoever uses them can refuse, and what is no setting of a person.
ANY_TEXT = {
    *("model", "listen", "metrics_listen", "store", "log_file", "api_key_file", "tls_cert", "tls_key"),
    *("peer_tls_cert", "peer_tls_key", "peer_tls_root"),
    *("status_fd", "parent_pipe_fd", "check", "gives_way", "print_config"),
}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CONFIG", "")
    monkeypatch.delenv("REDIS_URL", raising=False)


def bad_value(kind: type[Settings], name: str) -> str:
    """Choose a value that the setting cannot have."""
    plain = _plain_type(kind.model_fields[name].annotation)
    if name in BAD_TEXTS:
        return BAD_TEXTS[name]
    if plain in (int, float):
        return "-7"
    assert plain is bool or get_origin(plain) is Literal or kind.model_fields[name].metadata, f"{name} needs a value"
    return "maybe-not!"


CASES = [(kind, name) for kind in KINDS for name in kind.model_fields if name not in ANY_TEXT]


def ids(value: Any) -> str:
    return value if isinstance(value, str) else str(value.section)


@pytest.mark.parametrize(("kind", "name"), CASES, ids=ids)
def test_a_service_calls_a_wrong_setting_as_it_was_typed(
    kind: type[Settings], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = bad_value(kind, name)
    needed = ["--model=m"] if kind is WorkerSettings else []
    if _plain_type(kind.model_fields[name].annotation) is not bool:
        assert_named(refusal(kind, [*needed, f"{flag_of(name)}={value}"]), flag_of(name), value)
    variable = f"{kind.prefix()}{name.upper()}"
    for spelt in (variable, variable.lower()):
        with monkeypatch.context() as context:
            context.setenv(spelt, value)
            assert_named(refusal(kind, needed), spelt, value)
    file = tmp_path / "quire.toml"
    file.write_text(f'[{kind.section}]\n{name} = "{value}"\n')
    monkeypatch.setenv("QUIRE_CONFIG", str(file))
    assert_named(refusal(kind, needed), f"[{kind.section}] {name}", value)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in passed_fields(kind)], ids=ids)
def test_quire_serve_calls_a_wrong_setting_of_a_service_as_it_was_typed(
    kind: type[Settings], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in ANY_TEXT:
        return
    value = bad_value(kind, name)
    for said, label in ways_to_serve(kind, name, value, tmp_path, monkeypatch):
        assert_named(said, label, value)


def ways_to_serve(
    kind: type[Settings], name: str, value: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, str]]:
    """Refusals for each way to give the value, with the setting's name in that way."""
    yield serve_refusal({name: value}), flag_of(name)
    for prefix in ("QUIRE_SERVE_", kind.prefix()):
        with monkeypatch.context() as context:
            context.setenv(f"{prefix}{name.upper()}", value)
            yield serve_refusal({}), f"{prefix}{name.upper()}"
    file = folder / "quire.toml"
    for table in ("serve", kind.section):
        file.write_text(f'[{table}]\n{name} = "{value}"\n')
        yield serve_refusal({}, file), f"[{table}] {name}"
        monkeypatch.setenv("QUIRE_CONFIG", "")


def refusal(kind: type[Settings], arguments: list[str]) -> str:
    with pytest.raises(ValueError) as caught:
        parse(kind, arguments)
    return str(caught.value)


def serve_refusal(flags: dict[str, str], config: Path | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        settle_all({"model": "m", **flags}, config)
    return str(caught.value)


def assert_named(said: str, label: str, value: str) -> None:
    """Says the setting by this name alone, and its value."""
    assert said.startswith(f"{label}: ") and value in said, said


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({}, "give --num-blocks 3, not --num-blocks-9, or --device cpu"),
        ({"num_blocks": "QUIRE_X"}, "give QUIRE_X 3, not --num-blocks-9, or --device cpu"),
        ({"device": "[serve] device"}, "give --num-blocks 3, not --num-blocks-9, or [serve] device cpu"),
    ],
)
def test_whole_flags_give_way_to_what_was_typed(names: dict[str, str], said: str) -> None:
    assert as_typed("give --num-blocks 3, not --num-blocks-9, or --device cpu", names) == said


def test_sizes_that_exclude_each_other_are_each_called_as_they_were_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_WORKER_KV_MEMORY_FRACTION", "0.5")
    assert serve_refusal({"num_blocks": "4"}).startswith("--num-blocks 4 and QUIRE_WORKER_KV_MEMORY_FRACTION 0.5 each")
    file = tmp_path / "quire.toml"
    file.write_text("[serve]\nkv_memory_bytes = 9\n")
    said = serve_refusal({}, file)
    assert said.startswith("QUIRE_WORKER_KV_MEMORY_FRACTION 0.5 and [serve] kv_memory_bytes 9 each set the size")


def test_a_settings_file_that_cannot_be_opened_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x" * 300
    assert long in serve_refusal({}, Path(long))
    monkeypatch.setenv("QUIRE_CONFIG", long)
    assert f"the settings file {long} cannot be read: File name too long" in refusal(SchedulerSettings, [])
