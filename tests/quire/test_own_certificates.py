"""Copies of certificates that `quire serve` gives to its services, and what becomes of them when files are renewed."""

from pathlib import Path

import pytest

from quire.cli.serve_settings import settle_all
from quire.cli.supervisor.own_certificates import OwnCertificates
from tests.peer_certificates import PeerCertificates

NAMES = ("localhost", "127.0.0.1", "*.example.org")


class Site:
    """Certificates of a deployment whose services have all there are, and what the user is told of them."""

    def __init__(self, folder: Path) -> None:
        self.made = PeerCertificates(folder / "files", *NAMES)
        self.folder = folder / "copies"
        self.said: list[str] = []
        given = {"model": "m", "tls_cert": self.made.cert, "tls_key": self.made.key, **self.made.settings}
        self.kept = OwnCertificates(settle_all(given, None), self.folder, self.said.append)

    def renew(self) -> list[str]:
        """Messages of one round."""
        self.said.clear()
        self.kept.renew()
        return self.said


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_services_get_copies_that_their_owner_alone_can_read(site: Site) -> None:
    services = site.kept.services
    for settings in (services.scheduler, services.worker, services.gateway):
        for name in ("tls_cert", "peer_tls_cert"):
            copy = getattr(settings, name, None)
            assert copy is None or (copy.parent == site.folder and copy.read_bytes() == site.made.cert.read_bytes())
    assert f"--tls-cert={site.folder}/gateway-tls_cert.pem" in services.gateway_flags
    assert not any(str(site.made.cert) in flag for flag in (*services.scheduler_flags, *services.worker_flags))
    assert not any(each.stat().st_mode & 0o077 for each in (site.folder, *site.folder.iterdir()))


def test_a_renewed_certificate_is_told_once_and_trusted_beside_the_one_before(site: Site) -> None:
    assert site.renew() == []
    before = site.made.cert.read_bytes()
    for _ in range(2):
        site.made.renew()
        assert site.renew() == [f"certificate renewed: {site.made.cert}"] and site.renew() == []
        after = site.made.cert.read_bytes()
        copies = [each.read_bytes() for each in site.folder.glob("*_cert.pem")]
        assert copies == [after] * 4
        assert site.kept.trusted is not None and site.kept.trusted.read_bytes() == after + b"\n" + before
        before = after


def test_what_does_not_fit_is_told_once_and_not_copied(site: Site) -> None:
    before, key = site.made.cert.read_bytes(), site.made.key.read_bytes()
    site.made.renew()
    renewed = site.made.key.read_bytes()
    site.made.key.write_bytes(key)
    told = site.renew()
    assert told and all("is not used, and the one before is shown on: " in each for each in told)
    assert site.renew() == []
    assert {each.read_bytes() for each in site.folder.glob("*_cert.pem")} == {before}
    site.made.key.write_bytes(renewed)
    assert site.renew() == [f"certificate renewed: {site.made.cert}"]


def test_a_certificate_may_gain_names_and_lose_none_that_the_services_may_dial(site: Site) -> None:
    site.made.renew(names=(*NAMES, "other.example.org"))
    assert site.renew() == [f"certificate renewed: {site.made.cert}"]
    site.made.renew(names=("other.example.org",))
    (told,) = site.renew()
    assert "it has not the name *.example.org any more; start quire serve again" in told


def test_copies_that_cannot_be_written_are_written_later(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.made.renew()
    site.folder.rename(site.folder.with_name("away"))
    assert all("cannot be copied: " in each for each in site.renew())
    assert all("cannot be copied: " in each for each in site.renew())
    site.folder.with_name("away").rename(site.folder)
    assert site.renew() == [f"certificate renewed: {site.made.cert}"]
    assert {each.read_bytes() for each in site.folder.glob("*_cert.pem")} == {site.made.cert.read_bytes()}


def test_without_certificates_nothing_is_copied(tmp_path: Path) -> None:
    kept = OwnCertificates(settle_all({"model": "m"}, None), tmp_path / "copies", print)
    kept.renew()
    assert kept.trusted is None and not (tmp_path / "copies").exists()
