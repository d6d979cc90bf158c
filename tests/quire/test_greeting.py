"""Greeting of `quire serve`: a first command that works with keys, with TLS and without a tokenizer."""

import dataclasses
import shlex
import sys
from pathlib import Path

import pytest

from quire.access_settings import AccessSettings
from quire.cli.greeting import access_lines, first_lines, thread_warnings
from quire.results import Model
from tests.peer_certificates import PeerCertificates

MODEL = Model(
    name="m",
    fingerprint="f",
    architecture="LlamaForCausalLM",
    dtype="float32",
    max_model_len=64,
    vocab_size=8,
    eos_token_ids=(2,),
    has_tokenizer=True,
    has_chat_template=False,
)
OPEN = AccessSettings()


@pytest.fixture(autouse=True)
def no_access(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIRE_API_KEY", "QUIRE_TLS_ROOT", "QUIRE_TLS_SERVER_NAME"):
        monkeypatch.delenv(name, raising=False)


def test_a_first_command_names_the_address_unless_it_is_the_usual_one() -> None:
    assert first_lines(MODEL, "127.0.0.1:7847", OPEN) == [("try", "quire generate 'Once upon a time'")]
    assert first_lines(MODEL, "h:1", OPEN) == [("try", "quire generate --address h:1 'Once upon a time'")]
    assert access_lines(OPEN) == []


def test_a_first_command_can_be_typed_as_it_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Regression: a folder with a space parted it, zsh took [::1] for a pattern, and a `quire` of others was named."""
    ours, others = tmp_path / "with space" / "quire", tmp_path / "others" / "quire"
    for program in (ours, others):
        program.parent.mkdir()
        program.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(ours)])
    monkeypatch.setenv("PATH", str(others.parent))
    [(_, tried)] = first_lines(MODEL, "[::1]:1", OPEN)
    assert shlex.split(tried)[:4] == [str(ours), "generate", "--address", "[::1]:1"] and "'[::1]:1'" in tried
    monkeypatch.setenv("PATH", str(ours.parent))
    assert first_lines(MODEL, "h:1", OPEN) == [("try", "quire generate --address h:1 'Once upon a time'")]


def test_a_model_without_a_tokenizer_is_warned_of_and_tried_with_token_ids() -> None:
    [(kind, warning), tried] = first_lines(dataclasses.replace(MODEL, has_tokenizer=False), "h:1", OPEN)
    assert kind == "warning" and "tokenizer.json" in warning
    assert tried == ("try", "quire bench --address h:1 --num-requests 8")


def test_with_keys_and_tls_the_first_command_has_the_variables_that_it_needs_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("secret")
    made = PeerCertificates(tmp_path / "tls", "llm.example.org")
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    keys = AccessSettings(api_key_file=tmp_path / "keys")
    [(_, said)] = access_lines(keys)
    assert f"such as one of {tmp_path}/keys: commands by QUIRE_API_KEY, HTTP by Authorization: Bearer" in said
    [(_, tried)] = first_lines(MODEL, "h:1", keys)
    assert tried == "QUIRE_API_KEY=KEY quire generate --address h:1 'Once upon a time'"
    monkeypatch.setenv("QUIRE_TLS_ROOT", "/c d.pem")
    monkeypatch.setenv("QUIRE_TLS_SERVER_NAME", "llm.example.org")
    [(_, tried)] = first_lines(MODEL, "h:1", AccessSettings(tls_cert=made.cert, tls_key=made.key))
    assert tried.startswith("QUIRE_API_KEY=KEY QUIRE_TLS_ROOT='/c d.pem' QUIRE_TLS_SERVER_NAME=llm.example.org quire ")
    [(_, tried)] = first_lines(MODEL, "h:1", OPEN)
    assert "TLS" not in tried  # whose variables are for other servers


def test_more_threads_than_processors_are_warned_of() -> None:
    [warning] = thread_warnings(3, 2)
    assert warning == "--threads 3 is more than the 2 processors here: steps are slower"
    assert thread_warnings(2, 2) == [] and thread_warnings(None, 2) == []
