"""Addresses of servers: checks them, and splits lists of them."""

import re

SCHEMES = ("dns:", "unix:", "unix-abstract:", "ipv4:", "ipv6:")
LOOPBACK = ("127.", "localhost:", "[::1]:", "unix")

_HOST_AND_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")
_LISTEN = re.compile(r"(\[[^\s\[\]]+\]|[^\s:\[\]]+):(?P<port>[0-9]+)")  # of IPv6 with a zone, too


def check_address(address: str) -> str:
    """The given text, if it is an address or several with commas between.

    Raises ValueError if it is neither host:port nor a gRPC target, TypeError if it is no text.
    """
    if not isinstance(address, str):
        raise TypeError(f"an address is a text such as 127.0.0.1:7847, not {address!r:.80}")
    if address.startswith(SCHEMES):
        return address
    for each in split_addresses(address) or [address]:
        match = _HOST_AND_PORT.fullmatch(each)
        if match is None or not 0 < int(match["port"]) < 65536:
            raise ValueError(f"{each!r} is not an address; write host:port, such as 127.0.0.1:7847")
    return address


def check_listen_address(address: str) -> str:
    """The given text, if it is a host and a port, or 0 for a free one. Raises ValueError."""
    match = _LISTEN.fullmatch(address)
    if match is None:
        raise ValueError(f"{address!r} is not host:port; write such as 127.0.0.1:7847, or [::1]:7847 with IPv6")
    if int(match["port"]) > 65535:
        raise ValueError(f"{address!r} has no port: one is at most 65535, and 0 takes a free one")
    return address


def check_host(address: str) -> str:
    """The given text, if it is a host with or without a port. Raises ValueError."""
    if not any(_HOST_AND_PORT.fullmatch(each) for each in (address, f"{address}:1")):
        raise ValueError(f"{address!r} is not a host; write host or host:port, such as worker-1 or 10.0.0.7:7850")
    return address


def split_addresses(text: str) -> list[str]:
    """The addresses of a list with commas between."""
    return [each for each in (part.strip() for part in text.split(",")) if each]
