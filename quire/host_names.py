"""Host names of servers: resolves them, and remembers what each was found to be while it cannot be looked up.

A resolver that fails, or takes long, is no sign that servers are gone: their last addresses stay known.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence

LookUp = Callable[[str, int], Awaitable[list[str]]]


async def look_up(host: str, port: int) -> list[str]:
    """IP addresses of a host. Raises OSError or UnicodeError."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(info[4][0]) for info in infos})


class HostNames:
    """The last result for each address that was resolved. Belongs to one event loop."""

    def __init__(self, look_up: LookUp = look_up) -> None:
        self._look_up = look_up
        self._found: dict[str, list[str]] = {}  # addresses by the one with the name
        self._name_of: dict[str, str] = {}  # the other way round
        self._looking: dict[str, asyncio.Task[None]] = {}  # one for each name at most, however long it takes
        self._failures: dict[str, str] = {}  # reasons by address

    async def resolve(self, addresses: Sequence[str], limit_s: float) -> list[str]:
        """The addresses, with each host name that has several addresses replaced by all of them.

        A name that is not resolved within the limit stays what it was found to be last; the look-up goes on, and its
        result counts the next time. One that was never found stays as it is, as localhost does: dialling it raises the
        error.
        """
        names = {each for each in addresses if _is_name(each)}
        looking = [self._begin(each) for each in names]
        if looking:
            await asyncio.wait(looking, timeout=limit_s)
        for each in names & self._looking.keys():
            self._failures[each] = f"no answer within {limit_s:g} s"
        return list(dict.fromkeys(found for each in addresses for found in self._found.get(each, [each])))

    def name_of(self, address: str) -> str | None:
        """The address with the host name that this one was found for; None: it is of no name, or its only address."""
        return self._name_of.get(address)

    @property
    def failure(self) -> str | None:
        """Reason why a name was not resolved when it was tried last; None: there is none."""
        return next(iter(self._failures.values()), None)

    def close(self) -> None:
        """Give up look-ups that go on."""
        for each in self._looking.values():
            each.cancel()

    def _begin(self, address: str) -> "asyncio.Task[None]":
        if address not in self._looking:
            looking = asyncio.get_running_loop().create_task(self._resolve(address), name="quire-look-up")
            self._looking[address] = looking
        return self._looking[address]

    async def _resolve(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        try:
            hosts = await self._look_up(host, int(port))
        except Exception as error:  # of the resolver, of the name, or no thread is left to ask in
            self._failures[address] = repr(error)
        else:
            self._failures.pop(address, None)
            several = [f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts]
            self._found[address] = several if len(hosts) > 1 else [address]
            self._name_of.update(dict.fromkeys(several, address) if len(hosts) > 1 else {})
        finally:
            del self._looking[address]


def _is_name(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return host not in ("", "localhost") and port.isdigit() and not _is_literal(host)


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
