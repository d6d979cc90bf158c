"""Chooses the server of a deployment to talk to: the leader, as far as it is known.

Knows addresses and channels. The caller decides what to call, and whether to retry.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import grpc

from quire.address import LOOPBACK, SCHEMES, split_addresses
from quire.client_home import CLOSED
from quire.credentials import Credentials, Metadata
from quire.errors import NotLeaderError, QuireError
from quire.host_names import HostNames
from quire.rpc import PUBLIC_MESSAGE_BYTES, SHARD_KEY, channel_options

_CONNECT_S = 0.5  # for one of several servers; a frozen one would be waited for much longer
_DOWN_S = 3.0  # for this time a server that was not reached is tried after the others, unless it is reached again
_RETIRED_S = 130.0  # time for the last calls of a channel that was given up; longer than any call waits
_RESOLVE_S = 1.0  # between two lookups of the names, while no server leads; no call waits for one longer


class Servers:
    """The addresses of one client and a channel to each that was tried. Belongs to one event loop."""

    def __init__(self, address: str, credentials: Credentials, shard: int = 0, names: HostNames | None = None) -> None:
        """Take one address, or several with commas between; a host name stands for all of its addresses.

        `shard`: number of the shard whose leader is wanted. `names`: resolves host names.
        """
        self._credentials = credentials
        self._metadata: Metadata = (*credentials.metadata, (SHARD_KEY, str(shard)))
        self._given = [address] if address.startswith(SCHEMES) else split_addresses(address)
        self._names = names or HostNames()
        self._known: Sequence[str] = self._given  # the given ones, resolved
        self._current = self._given[0]
        self._is_resolved = False
        self._may_resolve_s = 0.0
        self._down_until_s: dict[str, float] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._opened_with: dict[str, object] = {}  # by address: certificates and name of its channel
        self._renewed: set[str] = set()  # addresses whose first channel was given up
        self._retired: dict[asyncio.Task[None], grpc.aio.Channel] = {}  # closed once their calls have ended
        self._is_closed = False

    @property
    def channel(self) -> grpc.aio.Channel:
        """Channel for stubs: each call goes to the server that is current when it is made."""
        return cast(grpc.aio.Channel, _CurrentChannel(lambda: self.current_channel, self.metadata))

    @property
    def metadata(self) -> Metadata:
        """Metadata to send with each call."""
        return self._metadata

    @property
    def current(self) -> str:
        """Address of the server that is current now."""
        return self._current

    @property
    def current_channel(self) -> grpc.aio.Channel:
        """Channel to the server that is current now."""
        return self.channel_to(self._current)

    @property
    def all_channels(self) -> list[grpc.aio.Channel]:
        """Channels to every server."""
        return [self.channel_to(address) for address in dict.fromkeys([*self._known, self._current])]

    async def resolve_again(self) -> Sequence[str]:
        """Addresses of all servers, as their names are resolved by now."""
        self._is_resolved = False
        await self._resolve()
        return self._known

    def follow(self, address: str) -> None:
        """Make a server current, which may be at another address than the given ones."""
        self._current = address

    async def find_reachable(self) -> None:
        """Make a reachable server current, if there are several. Does not wait for silent ones."""
        await self._resolve()
        for _ in self._known if self._has_choice else ():
            channel = self.current_channel
            if await _is_ready(channel):
                return
            if self._channels.get(self._current) is channel:  # else another call has given it up meanwhile
                self._renew_certificates()
                self._pass_over()

    def record_failure(self, error: QuireError, *, was_reached: bool) -> bool:
        """Record the failure of a call, so that the next call goes to another server if that is better.

        Returns True if the leader's address is known.
        """
        if isinstance(error, NotLeaderError):
            self._is_resolved = False
            return self._follow(error.leader)
        if not was_reached:
            self._is_resolved = False
            self._renew_certificates()
            self._pass_over()
        return False

    def renew_connection(self, channel: grpc.aio.Channel) -> None:
        """Open a new connection for later calls, if this channel's connection is still open.

        For callers whose call failed without an answer of the server. A flipped bit in settings, in a window's size or
        in a header that both ends remember breaks every later call of a connection, although pings are still answered.
        """
        address = next((each for each, known in self._channels.items() if known is channel), None)
        if address is None or channel.get_state() is not grpc.ChannelConnectivity.READY:
            return
        self._renewed.add(address)
        self._retire(address)

    async def close(self) -> None:
        """Closes every channel. What asks for another one then gets RuntimeError."""
        self._is_closed = True
        self._names.close()
        channels = [*self._retired.values(), *self._channels.values()]
        for task in self._retired:
            task.cancel()
        await asyncio.gather(*(channel.close() for channel in channels))

    @property
    def _has_choice(self) -> bool:
        return len(self._known) > 1 or self._current not in self._known

    async def _resolve(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._is_resolved or now_s < self._may_resolve_s or self._given[0].startswith(SCHEMES):
            return
        self._is_resolved, self._may_resolve_s = True, now_s + _RESOLVE_S
        known = await self._names.resolve(self._given, _RESOLVE_S)
        was_known = self._current in self._known  # by now: another call may have been told of the leader meanwhile
        self._known = known
        if was_known and self._current not in self._known:
            self._current = self._known[0]
        for gone in self._channels.keys() - {*known, self._current}:
            self._retire(gone)
        self._down_until_s = {each: until_s for each, until_s in self._down_until_s.items() if each in self._channels}

    def _renew_certificates(self) -> None:
        """Give up the current channel if one opened now had other certificates or a name: it may fail for that."""
        if self._opened_with.get(self._current) != self._opening_with(self._current):
            self._retire(self._current)

    def _opening_with(self, address: str) -> object:
        return self._credentials.certificates, self._names.name_of(address)

    def _retire(self, address: str) -> None:
        """Close the channel to an address once its calls have ended; the next call opens another."""
        self._opened_with.pop(address, None)
        channel = self._channels.pop(address, None)
        if channel is None:
            return
        task = asyncio.get_running_loop().create_task(channel.close(_RETIRED_S), name="quire-retired-channel")
        self._retired[task] = channel
        task.add_done_callback(self._retired.pop)

    def _follow(self, leader: str | None) -> bool:
        is_new = leader is not None and leader != self._current and not self._is_down(leader)
        self._current = leader if leader is not None and is_new else self._next()
        return is_new

    def _pass_over(self) -> None:
        if self._has_choice:
            self._down_until_s[self._current] = asyncio.get_running_loop().time() + _DOWN_S
            self._current = self._next()

    def _next(self) -> str:
        """The next address that is not down; simply the next one if all are."""
        known = list(self._known)
        start = known.index(self._current) + 1 if self._current in known else 0
        ring = [*known[start:], *known[:start]]
        return next((address for address in ring if not self._is_down(address)), ring[0])

    def _is_down(self, address: str) -> bool:
        """True if a server was not reached lately; its channel goes on trying."""
        if asyncio.get_running_loop().time() >= self._down_until_s.get(address, 0.0):
            return False
        return self.channel_to(address).get_state(try_to_connect=True) is not grpc.ChannelConnectivity.READY

    def channel_to(self, address: str) -> grpc.aio.Channel:
        """Channel to one server. Raises RuntimeError after `close`."""
        if self._is_closed:
            raise RuntimeError(CLOSED)
        if address not in self._channels:
            args: list[tuple[str, Any]] = list(channel_options(PUBLIC_MESSAGE_BYTES))
            if address.startswith(LOOPBACK):  # a proxy of the environment cannot reach this machine's loopback
                args.append(("grpc.enable_http_proxy", 0))
            if address in self._renewed:  # or gRPC would share the connection that was given up
                args.append(("grpc.use_local_subchannel_pool", 1))
            self._opened_with[address] = self._opening_with(address)
            self._channels[address] = self._credentials.open_channel(address, args, self._names.name_of(address))
        return self._channels[address]


class _CurrentChannel:
    """The part of a channel's interface that stubs use."""

    def __init__(self, current: Callable[[], grpc.aio.Channel], metadata: Metadata) -> None:
        self._current = current
        self._metadata = metadata

    def unary_unary(self, *method: Any, **how: Any) -> Callable[..., Any]:
        return lambda *request, **given: self._current().unary_unary(*method, **how)(*request, **self._with(given))

    def unary_stream(self, *method: Any, **how: Any) -> Callable[..., Any]:
        return lambda *request, **given: self._current().unary_stream(*method, **how)(*request, **self._with(given))

    def stream_stream(self, *method: Any, **how: Any) -> Callable[..., Any]:
        return lambda *request, **given: self._current().stream_stream(*method, **how)(*request, **self._with(given))

    def _with(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"metadata": self._metadata, **given}


async def _is_ready(channel: grpc.aio.Channel) -> bool:
    """True if the channel's server can be reached now or soon."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            state = channel.get_state(try_to_connect=True)
            while state is not grpc.ChannelConnectivity.READY:
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    return False
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError:  # or our loop was blocked, and has not heard yet that it was reached
        return channel.get_state() is grpc.ChannelConnectivity.READY
    except grpc.aio.UsageError:  # another call has given the channel up
        return False
    return True
