"""Keys and certificates of `quire serve`: what it starts reaches the scheduler, and nobody else does without a key."""

import json
import os
import signal
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import quire
from quire.access_settings import AccessSettings
from quire.access_variables import TLS_CLIENT_CERT, TLS_CLIENT_KEY, TLS_ROOT, TLS_SERVER_NAME
from quire.certificates import certificate_names
from quire.cli.supervisor.shared_access import share_access
from tests.peer_certificates import PeerCertificates
from tests.quire.serve_processes import ServeProcesses

KEY = "sk-0123456789"
OF_CERTIFICATES = (TLS_ROOT, TLS_SERVER_NAME, TLS_CLIENT_CERT, TLS_CLIENT_KEY)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIRE_API_KEY", *OF_CERTIFICATES):
        monkeypatch.setenv(name, "")  # restored by monkeypatch after the command has set it
        monkeypatch.delenv(name)


def test_names_of_a_certificate_are_read_from_it(tmp_path: Path) -> None:
    made = PeerCertificates(tmp_path / "tls", "127.0.0.1", "*.example.org", "example.org")
    assert certificate_names(made.cert, made.key) == ["*.example.org", "example.org", "127.0.0.1"]


@pytest.mark.parametrize(("host", "name"), [("127.0.0.1", None), ("localhost", "quire.example.org")])
def test_our_services_expect_a_name_of_the_certificate(tmp_path: Path, host: str, name: str | None) -> None:
    made = PeerCertificates(tmp_path / "tls", "127.0.0.1", "*.example.org")
    (tmp_path / "keys").write_text(KEY)
    os.environ["QUIRE_API_KEY"] = "sk-of-the-variable"
    settings = AccessSettings(api_key_file=tmp_path / "keys", tls_cert=made.cert, tls_key=made.key)
    (tmp_path / "trusted.pem").write_bytes(made.root.read_bytes())
    share_access(settings, host, tmp_path / "trusted.pem")
    own, *others = os.environ["QUIRE_API_KEY"].split(",")
    assert len(own) == 64 and others == ["sk-of-the-variable"]
    assert os.environ["QUIRE_TLS_ROOT"] == str(tmp_path / "trusted.pem")
    assert os.environ.get("QUIRE_TLS_SERVER_NAME") == name


def test_services_without_a_certificate_are_not_dialled_by_tls_whatever_the_shell_says() -> None:
    for name, value in zip(OF_CERTIFICATES, ("public", "llm.example.org", "/nope.pem", "/nope.pem"), strict=True):
        os.environ[name] = value
    share_access(AccessSettings(), "127.0.0.1", None)
    assert not any(name in os.environ for name in OF_CERTIFICATES)


def test_an_empty_variable_is_none_and_a_file_that_is_named_must_be_there(tmp_path: Path) -> None:
    made = PeerCertificates(tmp_path / "tls", "llm.example.org")
    settings = AccessSettings(tls_cert=made.cert, tls_key=made.key)
    for name in OF_CERTIFICATES:
        os.environ[name] = ""
    share_access(settings, "127.0.0.1", made.root)
    assert (os.environ[TLS_ROOT], os.environ[TLS_SERVER_NAME]) == (str(made.root), "llm.example.org")
    os.environ[TLS_ROOT] = "/nope.pem"
    with pytest.raises(ValueError, match=r"root certificates /nope\.pem cannot be read"):
        share_access(settings, "127.0.0.1", made.root)
    os.environ[TLS_ROOT], os.environ[TLS_CLIENT_CERT] = str(made.root), str(made.cert)
    with pytest.raises(ValueError, match="belong together"):
        share_access(settings, "127.0.0.1", made.root)


def test_a_certificate_that_cannot_be_used_is_refused_by_its_flag(tmp_path: Path) -> None:
    made, wrong = (PeerCertificates(tmp_path / name, "localhost") for name in ("right", "wrong"))
    for settings in (
        {"tls_cert": made.cert},
        {"tls_cert": made.cert, "tls_key": tmp_path / "none.pem"},
        {"tls_cert": made.cert, "tls_key": wrong.key},
        {"tls_cert": made.key, "tls_key": made.key},
    ):
        with pytest.raises(ValueError, match="--tls-cert"):
            AccessSettings.model_validate(settings)


@pytest.mark.long
def test_quire_serve_with_keys_and_a_certificate_for_another_name(tmp_path: Path) -> None:
    made = PeerCertificates(tmp_path / "tls", "llm.example.org")
    (tmp_path / "keys").write_text(KEY)
    (tmp_path / "keys").chmod(0o644)
    access = ("--api-key-file", str(tmp_path / "keys"), "--tls-cert", str(made.cert), "--tls-key", str(made.key))
    serving = ServeProcesses(tmp_path / "data", "--store", "memory", "--threads", "1", *access)
    try:
        serving.wait_for("try ")
        [url] = [word for word in serving.said.split() if word.startswith("https://")]
        address = next(word for word in serving.said.split("is ready at ")[1].split())
        root = str(made.root)
        with quire.Client(address, api_key=KEY, tls_root=root, tls_server_name="llm.example.org") as client:
            expected = client.generate("Once upon a time", max_tokens=8, temperature=0).text
        assert completion(url, made.root, KEY) == expected
        with pytest.raises(urllib.error.HTTPError, match="401"):
            completion(url, made.root, "sk-wrong")
        (tmp_path / "keys").write_text("sk-renewed\n")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            completion(url, made.root, KEY)
        kill(serving, "worker_svc")  # it comes back without a key of the file
        assert completion(url, made.root, "sk-renewed") == expected
        assert not any(KEY in command for command in serving.living().values())
        logs = "".join(each.read_text() for each in (tmp_path / "data" / "logs").iterdir())
        assert KEY not in logs + serving.said and logs.count("API keys renewed") == 2
        assert "callers send an API key" in serving.said and "QUIRE_TLS_ROOT" in serving.said
        assert "others on this machine can read a secret" in logs
    finally:
        serving.clean_up()


@pytest.mark.long
def test_a_renewed_certificate_is_shown_by_all_services_and_trusted_by_them(tmp_path: Path) -> None:
    made = PeerCertificates(tmp_path / "tls", "localhost", "127.0.0.1")
    renewed = PeerCertificates(tmp_path / "renewed", "localhost", "127.0.0.1")  # of an authority that nobody knows yet
    made.key.chmod(0o644)
    serving = ServeProcesses(
        tmp_path / "data", "--threads", "1", "--tls-cert", str(made.cert), "--tls-key", str(made.key)
    )
    try:
        serving.wait_for("try ")
        assert f"others on this machine can read a secret: chmod 600 {made.key}" in serving.said
        [url] = [word for word in serving.said.split() if word.startswith("https://")]
        address = next(word for word in serving.said.split("is ready at ")[1].split())
        before = completion(url, made.root)
        made.cert.write_bytes(renewed.cert.read_bytes())
        made.key.write_bytes(renewed.key.read_bytes()[:100])  # half of it is written
        serving.wait_for("is not used, and the one before is shown on")
        for name in ("scheduler_svc", "worker_svc"):
            kill(serving, name)
            assert completion(url, made.root) == before
        made.key.write_bytes(renewed.key.read_bytes())
        serving.wait_for("certificate renewed")
        for name in ("", "scheduler_svc", "worker_svc"):
            if name:
                kill(serving, name)
            assert completion(url, renewed.root) == before
            with quire.Client(address, tls_root=str(renewed.root)) as client:
                assert client.generate("Once upon a time", max_tokens=8, temperature=0).text == before
        assert serving.said.count("is not used") == serving.said.count("certificate renewed") == 1
        kept = list((tmp_path / "data" / "certificates").iterdir())
        assert len(kept) == 5 and not any(each.stat().st_mode & 0o077 for each in kept)
    finally:
        serving.clean_up()


def kill(serving: ServeProcesses, name: str) -> None:
    [pid] = [pid for pid, command in serving.living().items() if name in command]
    os.kill(pid, signal.SIGKILL)


def completion(url: str, root: Path, key: str = "none") -> str:
    """Text of 8 tokens by OpenAI's API."""
    context = ssl.create_default_context(cafile=root)
    context.check_hostname = False
    model = json.loads(call(f"{url}/models", context, key))["data"][0]["id"]
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    return str(json.loads(call(f"{url}/completions", context, key, json.dumps(body).encode()))["choices"][0]["text"])


def call(url: str, context: ssl.SSLContext, key: str, body: bytes | None = None) -> bytes:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(request, context=context, timeout=60) as answer:
        return bytes(answer.read())
