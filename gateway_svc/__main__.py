"""Entry point of the gateway: reads the settings, listens, and serves until told to end."""

import common.missing_extra

# isort: split
import asyncio
import gc
import socket
import ssl
import sys

import structlog
from starlette.types import ASGIApp

import common.grpc_environment  # noqa: F401 - before grpc is loaded
import quire
from common.access import AccessError, accepted_keys, http_context, key_to_send
from common.log import set_up_service_logging
from common.open_files import allow_connections, open_files_of_grpc
from common.process import end_after, run_service, stop_event
from common.refusal import refuse_to_start
from common.settings import settings_or_exit
from common.status import Status
from gateway_svc.app import create_app, for_web_pages
from gateway_svc.error_answer import answer_busy
from gateway_svc.http_server import HttpServer
from gateway_svc.key_check import OPEN_PATHS
from gateway_svc.listening import listening_socket
from quire.gateway_settings import GatewaySettings
from quire.listening import ListenError
from quire.settings import names_given, to_toml

SERVICE = "gateway"

log = structlog.get_logger()


def main() -> None:
    """Entry point of `python -m gateway_svc`."""
    settings = settings_or_exit(SERVICE, GatewaySettings, sys.argv[1:])
    if settings.print_config:
        sys.stdout.write(to_toml(settings) + "\n")
        return
    names = names_given(GatewaySettings, sys.argv[1:])
    set_up_service_logging(SERVICE, settings, Status(settings.status_fd), names)
    try:
        keys = accepted_keys(settings)
        tls = http_context(settings.tls_cert, settings.tls_key)
        client = quire.AsyncClient(
            settings.scheduler,
            api_key=key_to_send(settings),
            connect_timeout_s=settings.scheduler_timeout_s,
            reconnect_timeout_s=settings.scheduler_timeout_s,
        )
        sock = listening_socket(
            settings.listen,
            shares_port=settings.shares_port,
            slow_reader_timeout_s=settings.slow_reader_timeout_s,
        )
    except (AccessError, ListenError, ValueError) as error:
        refuse_to_start(SERVICE, str(error), names)
    app = create_app(client, max_body_bytes=settings.max_http_body_mb << 20, keys=keys, logs_calls=settings.access_log)
    gc.freeze()  # what was imported and made stays: a full collection, which stops every stream, need not walk it
    run_service(serve(settings, sock, client, app, tls))


async def serve(
    settings: GatewaySettings,
    sock: socket.socket,
    client: quire.AsyncClient,
    app: ASGIApp,
    tls: ssl.SSLContext | None,
) -> None:
    """Serve on the socket until SIGTERM, SIGINT or the supervisor's end."""
    end = stop_event(settings.parent_pipe_fd)
    open_files_of_grpc()
    async with client:
        server = HttpServer(
            for_web_pages(app, settings.origins),
            max_connections=allow_connections(settings.max_http_connections, option="--max-http-connections"),
            drain_timeout_s=settings.drain_timeout_s,
            busy=for_web_pages(answer_busy, settings.origins),
            open_paths=OPEN_PATHS,
            tls=tls,
        )
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        host, port = sock.getsockname()[:2]
        log.info("listening", address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        ending = asyncio.create_task(end.wait())
        await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        server.should_exit = True
        await serving
    log.info("gateway ended")


if __name__ == "__main__":
    end_after(main)
