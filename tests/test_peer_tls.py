"""Certificates between scheduler and workers: what is encrypted, who is refused, and what is said of a wrong one."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from structlog.testing import capture_logs

import quire
from common.peer_tls import PeerTls, certificate_fault, open_peer_channel, peer_tls_of
from quire.errors import UnavailableError
from quire.params import ClientKeywords
from quire.peer_tls_settings import PeerTlsSettings
from quire.scheduler_settings import SchedulerSettings
from quire.settings import parse
from quire.v1 import worker_pb2 as pb
from quire.v1 import worker_pb2_grpc
from tests.patience import patient
from tests.peer_certificates import PeerCertificates, grpc_port, peer_tls
from tests.services import Service, start_scheduler, start_worker
from worker_svc.service.block_source import GrpcBlockSource

NAME = "quire-worker"
WORKER = ("--dtype", "float32", "--threads", "1", "--num-blocks", "400")
PROMPT = "Once upon a time there was a clever boy named Anton. He lived with his aunt close to the harbour."


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> PeerCertificates:
    return PeerCertificates(tmp_path_factory.mktemp("tls") / "peers", NAME)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> PeerCertificates:
    """Certificates of another authority, for the same name."""
    return PeerCertificates(tmp_path_factory.mktemp("tls") / "others", NAME)


def tls_of(made: PeerCertificates, server_name: str | None = NAME) -> PeerTls:
    return peer_tls(made, server_name)


def server(tls: PeerTls | None) -> AbstractAsyncContextManager[str]:
    return grpc_port(None if tls is None else tls.of_server)


@pytest.mark.parametrize("left_out", ["peer_tls_cert", "peer_tls_key", "peer_tls_root"])
def test_certificate_key_and_authority_belong_together(certificates: PeerCertificates, left_out: str) -> None:
    given = {name: file for name, file in certificates.settings.items() if name != left_out}
    with pytest.raises(ValueError, match="belong together: give all three"):
        SchedulerSettings(**given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="belong together: give all three"):
        SchedulerSettings(peer_tls_server_name="x")


def test_a_certificate_that_its_authority_has_not_signed_is_refused_at_the_start_in_one_line(
    certificates: PeerCertificates, others: PeerCertificates
) -> None:
    options = [*certificates.options[:2], f"--peer-tls-root={others.root}"]
    with pytest.raises(ValueError, match=r"^--peer-tls-cert and --peer-tls-root do not fit: ") as refused:
        parse(SchedulerSettings, options)
    said = str(refused.value)
    assert f"{certificates.cert} is not to be trusted by {others.root}" in said and "\n" not in said
    wrong_key = [certificates.options[0], f"--peer-tls-key={others.key}", certificates.options[2]]
    with pytest.raises(ValueError, match=r"--peer-tls-cert .* and --peer-tls-key .* cannot be used"):
        parse(SchedulerSettings, wrong_key)


def test_without_certificates_there_is_no_tls() -> None:
    assert peer_tls_of(SchedulerSettings()) is None
    assert {name for name in PeerTlsSettings.model_fields if name.startswith("peer_tls")} == {
        *("peer_tls_cert", "peer_tls_key", "peer_tls_root", "peer_tls_server_name")
    }


async def test_peers_of_one_authority_find_no_fault_with_each_other(certificates: PeerCertificates) -> None:
    tls = tls_of(certificates)
    async with server(tls) as address:
        assert await certificate_fault(address, tls) == ""
        async with open_peer_channel(address, tls, ()) as channel:
            await asyncio.wait_for(channel.channel_ready(), 20)


async def test_each_wrong_certificate_is_told_in_one_line_that_says_what_to_change(
    certificates: PeerCertificates, others: PeerCertificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.peer_tls._TRIAL_S", patient(20))
    right, wrong = tls_of(certificates), tls_of(others)
    half = PeerCertificates(tmp_path / "half", NAME)  # trusts both authorities, and is trusted by its own
    half.root.write_bytes(half.root.read_bytes() + certificates.root.read_bytes())
    cases: list[tuple[PeerTls | None, PeerTls | None, str]] = [
        (right, wrong, f"its certificate is not to be trusted by --peer-tls-root {others.root}: "),
        (right, tls_of(half), f"it refuses the certificate {half.cert}: let one authority"),
        (right, tls_of(certificates, None), "its certificate has another name: give --peer-tls-server-name"),
        (None, right, "it serves without TLS, and this process asks for it"),
        (right, None, "it serves with TLS alone: give this process --peer-tls-cert"),
        (None, None, ""),
    ]
    for of_server, of_client, said in cases:
        async with server(of_server) as address:
            found = await certificate_fault(address, of_client)
            assert found.startswith(said) and "\n" not in found, found
            assert bool(found) == bool(said)
            if said and of_client is not None:  # a worker without certificates leaves it to its scheduler
                with pytest.raises(UnavailableError, match="cannot be read: it"):
                    async for _ in GrpcBlockSource(of_client).frames(address, pb.ReadBlocksRequest()):
                        pass
    assert await certificate_fault("127.0.0.1:1", right) == "", "nobody is there"


async def test_files_that_were_replaced_in_part_are_no_fault_and_hide_none(
    others: PeerCertificates, tmp_path: Path
) -> None:
    """Connections use those of the start until all three fit again."""
    made = PeerCertificates(tmp_path / "renewed", NAME)
    right = tls_of(made)
    for file, later in ((made.cert, others.cert), (made.key, others.key)):
        file.write_bytes(later.read_bytes())
    async with server(right) as address:
        assert await certificate_fault(address, right) == ""
        async with open_peer_channel(address, right, []) as channel:
            await asyncio.wait_for(channel.channel_ready(), patient(20))
        found = await certificate_fault(address, tls_of(others))
        assert found.startswith("its certificate is not to be trusted"), found


def test_a_key_that_others_can_read_is_warned_of(certificates: PeerCertificates, tmp_path: Path) -> None:
    made = PeerCertificates(tmp_path / "open", NAME)
    made.key.chmod(0o644)
    with capture_logs() as logs:
        tls_of(made)
    assert [(each["event"], each["file"]) for each in logs] == [
        ("others on this machine can read a secret", str(made.key))
    ]


@pytest.fixture(scope="module")
def site(certificates: PeerCertificates) -> Iterator[tuple[Service, Service, str]]:
    """Scheduler, a worker for prompts and one for what follows, and the scheduler's address."""
    options = (*certificates.options, f"--peer-tls-server-name={NAME}")
    with ExitStack() as stack:
        scheduler, address = start_scheduler(*options)
        stack.enter_context(scheduler)
        workers = [
            stack.enter_context(start_worker(address, "--worker-id", role, "--role", role, *WORKER, *options))
            for role in ("prefill", "decode")
        ]
        scheduler.wait_for("worker ready", 2)
        yield scheduler, workers[0], address


def test_steps_and_blocks_go_over_tls(site: tuple[Service, Service, str]) -> None:
    with quire.Client(site[2]) as client:
        text = client.generate(PROMPT, max_tokens=32, temperature=0).text
        stats = client.stats()
    assert text
    (decode,) = [worker for worker in stats.workers if worker.worker_id == "decode"]
    assert decode.fetched_blocks > 0


def test_a_worker_serves_nobody_without_a_certificate_of_the_authority(
    site: tuple[Service, Service, str], certificates: PeerCertificates, others: PeerCertificates
) -> None:
    address = str(site[1].wait_for("listening")["address"])
    root, named = certificates.root.read_bytes(), [("grpc.ssl_target_name_override", NAME)]
    pairs: list[tuple[bytes, ...]] = [(root,), (root, others.key.read_bytes(), others.cert.read_bytes())]
    channels = [grpc.secure_channel(address, grpc.ssl_channel_credentials(*each), named) for each in pairs]
    for channel in (*channels, grpc.insecure_channel(address)):
        with channel, pytest.raises(grpc.RpcError) as refused:
            stub: Any = worker_pb2_grpc.WorkerStub(channel)
            stub.Describe(pb.DescribeRequest(), timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_probe_with_a_certificate_sees_the_workers_health(
    site: tuple[Service, Service, str], certificates: PeerCertificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = str(site[1].wait_for("listening")["address"])
    options: ClientKeywords = {"tls_root": str(certificates.root), "tls_server_name": NAME}
    with quire.Client(address, **options) as client, pytest.raises(quire.UnavailableError):
        client.health("quire.v1.Worker")
    monkeypatch.setenv("QUIRE_TLS_CLIENT_CERT", str(certificates.cert))
    with pytest.raises(ValueError, match=r"QUIRE_TLS_CLIENT_CERT, QUIRE_TLS_CLIENT_KEY and QUIRE_TLS_ROOT\) belong"):
        quire.Client(address, **options)
    monkeypatch.setenv("QUIRE_TLS_CLIENT_KEY", str(certificates.key))
    with quire.Client(address, **options) as client:
        assert client.health("quire.v1.Worker") is quire.Health.SERVING


def test_a_scheduler_says_in_one_line_why_it_cannot_use_a_worker_of_another_authority(
    site: tuple[Service, Service, str], others: PeerCertificates
) -> None:
    scheduler, _, address = site
    with start_worker(address, "--worker-id", "stranger", *WORKER, *others.options) as stranger:
        line = scheduler.wait_for("worker not usable")
        assert (line["worker_id"], line["address"]) == ("stranger", stranger.wait_for("listening")["address"])
        assert "its certificate is not to be trusted by --peer-tls-root" in line["reason"]


def test_an_authority_below_the_first_is_one_too(tmp_path: Path) -> None:
    middle = trustme.CA().create_child_ca()
    made = PeerCertificates(tmp_path / "middle", NAME, authority=middle)
    assert peer_tls_of(SchedulerSettings(**made.settings)) is not None  # type: ignore[arg-type]
