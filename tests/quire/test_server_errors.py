"""Messages about servers that do not answer: the reason, in words without gRPC's own."""

import grpc
import pytest

from quire.server_errors import unreachable_error

DETAILS = {
    "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: Failed to connect to remote host: "
    "connect: Connection refused (111)": "connect: Connection refused (111)",
    "errors resolving nosuch:1: [field:hostname lookup error:UNKNOWN: address lookup failed for nosuch:1: Name or "
    "service not known]": "Name or service not known",
    "DNS resolution failed for nosuch:1: C-ares status is not ARES_SUCCESS qtype=AAAA name=nosuch is_balancer=0: "
    "Domain name not found": "Domain name not found",
    "DNS resolution failed for nosuch:1: Timeout while contacting DNS servers": "Timeout while contacting DNS servers",
}


@pytest.mark.parametrize(("details", "why"), DETAILS.items())
def test_the_reason_alone_is_said(details: str, why: str) -> None:
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details)
    assert unreachable_error("nosuch:1", error).message.endswith(
        f"at nosuch:1 ({why}); start one with `quire serve MODEL`"
    )
