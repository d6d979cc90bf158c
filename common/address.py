"""Addresses of servers: where others reach one, from where it listens; and all that a written list stands for."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence

_ANY_HOST = ("0.0.0.0", "[::]", "*", "")


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


def split_addresses(text: str) -> list[str]:
    """The addresses of a list with commas between."""
    return [each for each in (part.strip() for part in text.split(",")) if each]


async def look_up(host: str, port: int) -> list[str]:
    """All IP addresses of a host. Raises OSError or UnicodeError."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(info[4][0]) for info in infos})


async def resolve(addresses: Sequence[str], look_up: Callable[[str, int], Awaitable[list[str]]] = look_up) -> list[str]:
    """The addresses, with each host name that has several addresses replaced by all of them.

    What cannot be resolved here, and localhost, stays as it is: whoever dials it says what is wrong with it.
    """
    found = await asyncio.gather(*(_resolve(each, look_up) for each in addresses))
    return list(dict.fromkeys(address for several in found for address in several))


async def _resolve(address: str, look_up: Callable[[str, int], Awaitable[list[str]]]) -> list[str]:
    host, _, port = address.rpartition(":")
    if host in ("", "localhost") or not port.isdigit() or _is_literal(host):
        return [address]
    try:
        hosts = await look_up(host, int(port))
    except (OSError, UnicodeError):
        return [address]
    return [f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts] if len(hosts) > 1 else [address]


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _has_port(address: str) -> bool:
    host, colon, port = address.rpartition(":")
    return bool(colon) and port.isdigit() and (":" not in host or host.endswith("]"))
