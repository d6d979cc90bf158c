"""API keys and certificates on both public ports: who is let in, who is not, and what stays open."""

import ssl
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx2
import openai
import pytest
import trustme

import quire
from gateway_svc.api_error import from_quire
from quire.api_keys import AcceptedKeys, read_api_keys
from quire.gateway_settings import GatewaySettings
from quire.settings import parse
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc
from tests.patience import patient
from tests.services import Service, start_gateway, start_scheduler

KEY, OTHER_KEY = "sk-first-0123456789", "sk-second-0123456789"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys in `keys`, a certificate for localhost in `cert.pem` and `key.pem`, its authority in `ca.pem`."""
    made = tmp_path_factory.mktemp("access")
    (made / "keys").write_text(f"# of tests\n{KEY}\n\n{OTHER_KEY}\n")
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(str(made / "key.pem"))
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(str(made / "cert.pem"), append=True)
    authority.cert_pem.write_to_path(str(made / "ca.pem"))
    for secret in ("keys", "key.pem"):
        (made / secret).chmod(0o600)
    return made


@pytest.fixture(scope="module")
def services(folder: Path) -> Iterator[tuple[Service, Service, str, str]]:
    """Scheduler and gateway with keys and certificate, the scheduler's address and the gateway's URL."""
    access = ("--api-key-file", "keys", "--tls-cert", "cert.pem", "--tls-key", "key.pem")
    options = [str(folder / each) if not each.startswith("--") else each for each in access]
    variables = {"QUIRE_TLS_ROOT": str(folder / "ca.pem"), "QUIRE_TLS_SERVER_NAME": "localhost"}
    with ExitStack() as stack:
        scheduler, address = start_scheduler(*options)
        stack.enter_context(scheduler)
        gateway, url = start_gateway(address, *options, env=variables)
        stack.enter_context(gateway)
        port = url.rpartition(":")[2]
        yield scheduler, gateway, address.replace("127.0.0.1", "localhost"), f"https://localhost:{port}"


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=folder / "ca.pem")


@pytest.fixture
def http(services: tuple[Service, Service, str, str], folder: Path) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=services[3], verify=trusting(folder), timeout=patient(60)) as client:
        yield client


@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
def test_the_sdk_is_let_in_with_each_key(services: tuple[Service, Service, str, str], folder: Path, key: str) -> None:
    with quire.Client(services[2], api_key=key, tls_root=str(folder / "ca.pem"), retries=0) as client:
        assert client.stats().num_running == 0
        assert key not in repr(client) + repr(vars(client))


@pytest.mark.parametrize("key", ["", "sk-wrong", KEY[:-1], KEY + "x", f"{KEY},{OTHER_KEY}"])
def test_the_sdk_is_refused_at_once_without_a_right_key(
    services: tuple[Service, Service, str, str], folder: Path, key: str
) -> None:
    with quire.Client(services[2], api_key=key, tls_root=str(folder / "ca.pem")) as client:
        with pytest.raises(quire.UnauthenticatedError, match="QUIRE_API_KEY"):
            client.stats()
        with pytest.raises(quire.UnauthenticatedError):
            client.generate("Once")
        with pytest.raises(quire.UnauthenticatedError):
            client.drain_worker("w")
        assert client.health() is quire.Health.NOT_SERVING  # open, and no worker is here


def test_a_key_from_the_variable_is_sent(
    services: tuple[Service, Service, str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", KEY)
    monkeypatch.setenv("QUIRE_TLS_ROOT", str(folder / "ca.pem"))
    with quire.Client(services[2]) as client:
        assert client.stats().num_running == 0


def test_a_server_is_believed_only_by_its_certificate(
    services: tuple[Service, Service, str, str], folder: Path, tmp_path: Path
) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    right, other = str(folder / "ca.pem"), str(tmp_path / "other.pem")
    for root, name in ((other, "localhost"), (right, "elsewhere"), ("", "localhost")):
        client = quire.Client(services[2], api_key=KEY, tls_root=root, tls_server_name=name, connect_timeout_s=0.3)
        with client, pytest.raises(quire.UnavailableError):
            client.stats()


async def test_refusals_are_the_same_for_every_kind_of_call(
    services: tuple[Service, Service, str, str], folder: Path
) -> None:
    certificates = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
    async with grpc.aio.secure_channel(services[2], certificates) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        metadata = (("authorization", "Basic abc"), ("authorization", "bearer"))
        for call in (
            stub.GetStats(pb.GetStatsRequest(), metadata=metadata),
            stub.Generate(pb.GenerateRequest(text="x"), metadata=metadata).read(),
            stub.Session(iter(()), metadata=metadata).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_http_takes_a_key_in_both_forms_and_refuses_in_openais_shape(http: httpx2.Client) -> None:
    for headers in ({"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer {OTHER_KEY}"}, {"x-api-key": KEY}):
        assert http.get("/openapi.json", headers=headers).status_code == 200
    for headers in ({}, {"authorization": f"Bearer {KEY}x"}, {"authorization": KEY}, {"x-api-key": "Bearer"}):
        answer = http.get("/v1/models", headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert KEY not in answer.text


def test_a_refusal_of_anthropics_api_has_its_shape(http: httpx2.Client) -> None:
    answer = http.post("/v1/messages", json={})
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/openapi.json", "/no/such"])
def test_every_other_path_needs_a_key(http: httpx2.Client, path: str) -> None:
    assert http.post(path, content=b"x" * 100).status_code == 401


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/ping", 200), ("/ready", 503), ("/metrics", 200)])
def test_probes_and_scrapes_need_none(http: httpx2.Client, path: str, status: int) -> None:
    assert http.get(path).status_code == status
    if path == "/metrics":
        assert "quire_scheduler_up 1.0" in http.get(path).text  # the gateway has a key for the scheduler


def test_openais_client_names_the_error(services: tuple[Service, Service, str, str], folder: Path) -> None:
    with httpx2.Client(verify=trusting(folder), timeout=patient(60)) as transport:
        client = openai.OpenAI(base_url=f"{services[3]}/v1", api_key="sk-wrong", http_client=transport, max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_no_key_is_in_a_command_line_or_a_log(services: tuple[Service, Service, str, str]) -> None:
    for service in services[:2]:
        command = Path(f"/proc/{service.process.pid}/cmdline").read_bytes().decode()
        assert not any(key in command + "".join(service.raw) for key in (KEY, OTHER_KEY))


@pytest.mark.parametrize("arguments", [["--api-key", KEY], [f"--api-key={KEY}"]])
def test_a_key_on_a_command_line_is_refused_without_showing_it(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match="--api-key-file or QUIRE_API_KEY") as refused:
        parse(GatewaySettings, arguments)
    assert KEY not in str(refused.value)


async def test_keys_are_added_and_revoked_while_services_run(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n{OTHER_KEY}\n")
    file.chmod(0o600)
    async with AsyncExitStack() as stack:
        scheduler, address = start_scheduler("--api-key-file", str(file))
        stack.enter_context(scheduler)
        gateway, url = start_gateway(address, "--api-key-file", str(file))
        stack.enter_context(gateway)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        staying, revoked = (open_session(channel, key) for key in (KEY, OTHER_KEY))
        assert [await status_of(each) for each in (staying, revoked)] == [None, None]
        file.write_text("")  # has no key: those before are accepted on
        assert await status_of(revoked) is None and http_status(url, OTHER_KEY) == 404
        file.write_text(f"{KEY}\nsk-third\n")
        assert await status_of(revoked) is grpc.StatusCode.UNAUTHENTICATED
        assert await status_of(staying) is None
        assert [http_status(url, key) for key in (KEY, OTHER_KEY, "sk-third")] == [404, 401, 404]
        assert await status_of(open_session(channel, "sk-third")) is None
        # Without a message: gRPC calls the writing of one INTERNAL if the call was refused before.
        assert await open_session(channel, OTHER_KEY).code() is grpc.StatusCode.UNAUTHENTICATED
        told = "".join(scheduler.raw)
        assert told.count("changed file of API keys not used") == told.count("API keys renewed") == 1


def open_session(channel: grpc.aio.Channel, key: str) -> Any:
    stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
    return stub.Session(metadata=(("authorization", f"Bearer {key}"),))


async def status_of(session: Any) -> grpc.StatusCode | None:
    """The status that ends the session at its next message; None if the message is answered."""
    try:
        await session.write(pb.SessionRequest(handle=1, attach=pb.Attach(request_id="nobody")))
        return None if (await session.read()).events else grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        return error.code()


def http_status(url: str, key: str) -> int:
    return httpx2.get(f"{url}/no/such", headers={"authorization": f"Bearer {key}"}, timeout=patient(60)).status_code


def test_keys_of_the_variable_come_before_those_of_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", f" sk-third , {KEY}")
    assert read_api_keys(folder / "keys") == ("sk-third", KEY, OTHER_KEY)
    monkeypatch.setenv("QUIRE_API_KEY", "")
    assert read_api_keys(None) == ()
    assert len(AcceptedKeys(read_api_keys(folder / "keys"))) == 2


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_variable_has_no_key_and_one_of_commas_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """A list whose parts are all empty came from a deployment that wants keys."""
    monkeypatch.setenv("QUIRE_API_KEY", value)
    assert read_api_keys(None) == ()
    monkeypatch.setenv("QUIRE_API_KEY", f",{value},")
    with pytest.raises(ValueError, match="QUIRE_API_KEY: it has commas and no key"):
        read_api_keys(None)


@pytest.mark.parametrize("text", ["", "# none\n", "sk key\n", "a,b\n", "k\x01\n", "ключ\n", "x" * 513])
def test_a_file_without_keys_or_with_something_else_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ValueError, match="API key") as refused:
        read_api_keys(tmp_path / "keys")
    if text.strip():
        assert text.strip() not in str(refused.value)


def test_a_key_that_the_gateway_itself_lacks_is_no_fault_of_its_caller() -> None:
    error = from_quire(quire.UnauthenticatedError("set QUIRE_API_KEY"), {})
    assert (error.status, error.kind) == (500, "server_error")
    assert "this gateway" in error.message
