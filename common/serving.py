"""The gRPC server of every service: one edge, health by service name, reflection.

Knows no service but health and reflection.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.connection_watch import ConnectionWatch
from common.health import SERVICE_NAME, HealthServicer
from common.key_check import KeyInterceptor
from common.limits import LimitsInterceptor, limit_options
from common.peer_limits import EdgeLimits
from common.rpc import QUICK_KEEPALIVE, EdgeInterceptor, Keepalive, server_options
from common.waits import end_tasks
from quire.api_keys import AcceptedKeys
from quire.listening import ListenError


class GrpcServer:
    """A server on one port, with health for `services` by their full names, all NOT_SERVING until set.

    For `slow_reader_timeout_s` see `EdgeInterceptor`; the default `keepalive` suits a port that only our services dial.
    `limits`: limits on calls of peers; None where all peers are ours. `keys`: the present API keys, of which a caller
    must have one; None: every caller is served. `credentials`: the certificate; None: no encryption.
    """

    def __init__(
        self,
        services: Sequence[str],
        max_message_bytes: int,
        *,
        slow_reader_timeout_s: float | None = None,
        keepalive: Keepalive = QUICK_KEEPALIVE,
        limits: EdgeLimits | None = None,
        keys: Callable[[], AcceptedKeys] | None = None,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        interceptors: list[grpc.aio.ServerInterceptor] = [EdgeInterceptor(slow_reader_timeout_s)]
        if keys is not None:
            interceptors.append(KeyInterceptor(keys))
        options = server_options(max_message_bytes, keepalive)
        self._watch: ConnectionWatch | None = None
        self._watching: asyncio.Task[None] | None = None
        if limits is not None:
            self._watch = ConnectionWatch(limits)
            interceptors.insert(0, LimitsInterceptor(self._watch.peers))
            options += limit_options(limits)
        self.grpc = grpc.aio.server(interceptors=interceptors, options=options)
        self._services = services
        self._credentials = credentials
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        names = (*services, SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)

    def bind(self, listen: str) -> str:
        """Binds host:port and returns the address bound. Raises ListenError."""
        try:
            _probe(listen)  # gRPC would fail as well, but report it on standard error and without the reason
            port = self._add_port(listen)
        except (OSError, RuntimeError, ValueError) as error:
            raise ListenError(f"cannot listen on {listen}: {error}; choose another with --listen host:port") from error
        return f"{listen.rsplit(':', 1)[0]}:{port}"

    def _add_port(self, listen: str) -> int:
        if self._credentials is None:
            return self.grpc.add_insecure_port(listen)
        return self.grpc.add_secure_port(listen, self._credentials)

    async def start(self) -> None:
        """Begins to serve, with nothing healthy yet: not the services, and not the process itself ("")."""
        for service in ("", *self._services):
            self.set_serving(service, False)
        await self.grpc.start()
        if self._watch is not None:
            self._watching = asyncio.create_task(self._watch.run())

    def set_serving(self, service: str, serving: bool) -> None:
        """Set the health of one service."""
        self._health.set_serving(service, serving)

    async def stop(self, grace_s: float) -> None:
        """Report all services unhealthy, refuse new calls, and give the open ones `grace_s` to end."""
        self._health.close()
        await self.grpc.stop(grace_s)
        if self._watching is not None:
            await end_tasks(self._watching)


def _probe(listen: str) -> None:
    """Binds the address for a moment. Raises OSError or ValueError if it cannot be bound."""
    host, colon, port = listen.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()):
        raise ValueError("it does not end in :port")
    if int(port) not in range(65536):  # it would be taken modulo 65536
        raise ValueError(f"there is no port {port}")
    address = socket.getaddrinfo(host.strip("[]") or None, int(port), type=socket.SOCK_STREAM)[0]
    with socket.socket(address[0], address[1]) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address[4])
