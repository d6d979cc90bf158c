"""A written list of addresses is taken apart, and one to listen on is looked at before anything listens."""

import pytest

from quire.address import split_addresses
from quire.gateway_settings import GatewaySettings
from quire.scheduler_settings import SchedulerSettings
from quire.settings import Settings, parse
from quire.worker_settings import WorkerSettings


def test_a_list_has_commas() -> None:
    assert split_addresses(" a:1, b:2,,") == ["a:1", "b:2"]


@pytest.mark.parametrize(
    "listen", ["127.0.0.1:0", "0.0.0.0:7847", "host-1.example:65535", "[::]:7847", "[fe80::1%eth0]:1"]
)
def test_a_host_and_a_port_can_be_listened_on(listen: str) -> None:
    assert parse(GatewaySettings, ["--listen", listen]).listen == listen


@pytest.mark.parametrize(
    "listen", ["localhost", "7847", ":7847", "127.0.0.1:", "127.0.0.1:-1", "::1:7847", "http://a:1"]
)
@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        (SchedulerSettings, "--listen"),
        (SchedulerSettings, "--metrics-listen"),
        (WorkerSettings, "--metrics-listen"),
        (GatewaySettings, "--listen"),
    ],
)
def test_what_is_no_host_and_port_is_refused_with_the_settings(kind: type[Settings], flag: str, listen: str) -> None:
    """Regression: of a scheduler's metrics it was a traceback once it led, of a gateway it had the words of `int`."""
    model = ["--model", "m"] if kind is WorkerSettings else []
    with pytest.raises(ValueError, match=rf"{flag}: .* is not host:port; write such as 127\.0\.0\.1:7847"):
        parse(kind, [flag, listen, *model])
