"""gRPC in a process of ours: no line of a peer that sends it away, and no proxy of the web in between."""

import os
import select
import socket
import subprocess
import sys
import threading

import pytest

from tests.patience import patient
from tests.services import ROOT

SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
REASON = b"ping_timeout"
GOAWAY = bytes([0, 0, 8 + len(REASON), 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 11]) + REASON
CALL = """
import sys
import common.grpc_environment
import grpc
try:
    grpc.insecure_channel(sys.argv[1]).unary_unary("/a/b")(b"", timeout=1)
except grpc.RpcError as error:
    print(error.code().name)
"""


def test_a_peer_that_sends_us_away_is_no_line_of_grpc_among_ours() -> None:
    """Peers do so to a process that was frozen. Logs are read by programs, as one JSON object a line."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()

        def send_away() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(SETTINGS + GOAWAY)
                connection.recv(1 << 16)

        sending = threading.Thread(target=send_away, daemon=True)
        sending.start()
        command = [sys.executable, "-c", CALL, f"{host}:{port}"]
        called = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(30.0), check=True)
    assert called.stdout
    assert called.stderr == ""


@pytest.mark.parametrize("proxy", ["grpc_proxy", "http_proxy"])
def test_a_proxy_for_the_web_is_not_between_our_services(proxy: str) -> None:
    """A proxy cannot reach a pod, or the loopback of this machine. One for gRPC is meant."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as web:
        environment = {**os.environ, "https_proxy": at(web), "http_proxy": at(web)}
        environment.pop("grpc_proxy", None)
        environment[proxy] = at(web)
        command = [sys.executable, "-c", CALL, at(server).removeprefix("http://")]
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=patient(30.0), check=True)
        dialled, _, _ = select.select([server, web], [], [], 0)
        assert dialled == [web if proxy == "grpc_proxy" else server]


def at(server: socket.socket) -> str:
    host, port = server.getsockname()
    return f"http://{host}:{port}"
