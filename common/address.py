"""The address that a server advertises to others, from the address that it listens on."""

import socket

_ANY_HOST = ("0.0.0.0", "[::]", "*")


def advertised_address(bound: str, advertise: str | None) -> str:
    """host:port for others to dial.

    Args:
        bound: host:port as bound.
        advertise: host or host:port to use instead; None: the bound host, or this machine's name if bound to all.
    """
    host, _, port = bound.rpartition(":")
    if advertise is None:
        return f"{socket.gethostname() if host in _ANY_HOST else host}:{port}"
    return advertise if _has_port(advertise) else f"{advertise}:{port}"


def _has_port(address: str) -> bool:
    host, colon, port = address.rpartition(":")
    return bool(colon) and port.isdigit() and (":" not in host or host.endswith("]"))
